cwlVersion: v1.2
class: CommandLineTool
doc: Settle whose masked updates are summed, once and for all, and what each facility is asked for.
baseCommand: [python3, -m, coordinator.steps.survivors, --out, request]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
  roster: {type: Directory, inputBinding: {prefix: --roster}}
  updates: {type: "Directory[]", inputBinding: {prefix: --updates, shellQuote: true}}
outputs:
  request: {type: Directory, outputBinding: {glob: request}}
