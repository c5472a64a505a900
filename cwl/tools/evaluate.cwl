cwlVersion: v1.2
class: CommandLineTool
doc: Evaluate the round's model on tasks at the coordinator, beside the facilities' jobs; nothing where none is due.
baseCommand: [python3, -m, coordinator.steps.evaluate, --out, scores.json]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
outputs:
  scores: {type: File, outputBinding: {glob: scores.json}}
