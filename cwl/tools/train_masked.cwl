cwlVersion: v1.2
class: CommandLineTool
doc: Train one round at a facility and mask its update. Ends with 0, or with 7 and the reason in failure.json, never otherwise; a killed job leaves nothing.
baseCommand: [python3, -m, facility.round, --out, update]
successCodes: [0, 7]
inputs:
  model: {type: Directory, inputBinding: {prefix: --model}}
  dataset: {type: string, inputBinding: {prefix: --dataset}}
  settings: {type: File, inputBinding: {prefix: --settings}}
  round: {type: int, inputBinding: {prefix: --round}}
  roster: {type: Directory, inputBinding: {prefix: --roster}}
outputs:
  update: {type: "Directory?", outputBinding: {glob: update}}
