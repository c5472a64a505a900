cwlVersion: v1.2
class: CommandLineTool
doc: Summarise the archive; fails when the federation stopped for a reason that needs a person.
baseCommand: [python3, -m, coordinator.steps.report, --out, summary.json]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  after: {type: "int?", doc: "only orders this step after the rounds"}
outputs:
  summary: {type: File, outputBinding: {glob: summary.json}}
