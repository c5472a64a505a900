cwlVersion: v1.2
class: CommandLineTool
doc: Choose what travels to one facility - the whole model, or the difference to the one that it holds.
baseCommand: [python3, -m, coordinator.steps.send, --out, sent]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
  facility: {type: string, inputBinding: {prefix: --facility}}
outputs:
  sent: {type: Directory, outputBinding: {glob: sent}}
