cwlVersion: v1.2
class: CommandLineTool
doc: Draw a facility's keys for the secure aggregation of one round, on its login node. Ends with 0, or with 7 and the reason.
baseCommand: [python3, -m, facility.keys, --out, update]
successCodes: [0, 7]
inputs:
  dataset: {type: string, inputBinding: {prefix: --dataset}}
  settings: {type: File, inputBinding: {prefix: --settings}}
  round: {type: int, inputBinding: {prefix: --round}}
outputs:
  update: {type: "Directory?", outputBinding: {glob: update}}
