cwlVersion: v1.2
class: CommandLineTool
doc: Collect the facilities' signed keys into the roster of the round - who masks with whom, and under which scales.
baseCommand: [python3, -m, coordinator.steps.roster, --out, roster]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
  keys: {type: "Directory[]", inputBinding: {prefix: --keys, shellQuote: true}}
outputs:
  roster: {type: Directory, outputBinding: {glob: roster}}
