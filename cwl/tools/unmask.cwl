cwlVersion: v1.2
class: CommandLineTool
doc: Answer, on a facility's login node, so that the sum of the round can be unmasked. Ends with 0, or with 7 and the reason.
baseCommand: [python3, -m, facility.unmask, --out, update]
successCodes: [0, 7]
inputs:
  request: {type: Directory, inputBinding: {prefix: --request}}
  dataset: {type: string, inputBinding: {prefix: --dataset}}
  settings: {type: File, inputBinding: {prefix: --settings}}
  round: {type: int, inputBinding: {prefix: --round}}
outputs:
  update: {type: "Directory?", outputBinding: {glob: update}}
