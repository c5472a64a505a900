cwlVersion: v1.2
class: CommandLineTool
doc: Look at the archive; begin with the initial model, or go on after the last complete round.
baseCommand: [python3, -m, coordinator.steps.start]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  model: {type: Directory, inputBinding: {prefix: --model}}
outputs: {model: Directory, round: int, proceed: boolean}
