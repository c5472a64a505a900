cwlVersion: v1.2
class: CommandLineTool
doc: Average the round's updates into the next global model, append the round to the archive, decide whether to go on.
baseCommand: [python3, -m, coordinator.steps.aggregate]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
  updates: {type: "Directory[]", inputBinding: {prefix: --updates, shellQuote: true}}
  scores: {type: "File?", inputBinding: {prefix: --scores}}
outputs: {model: Directory, round: int, proceed: boolean}
