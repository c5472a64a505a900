cwlVersion: v1.2
class: CommandLineTool
doc: Verify an update as soon as its facility ends; what comes out is a sound update or the reason why there is none.
baseCommand: [python3, -m, coordinator.steps.receive, --out, update]
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  model: {type: Directory, inputBinding: {prefix: --model}}
  round: {type: int, inputBinding: {prefix: --round}}
  facility: {type: string, inputBinding: {prefix: --facility}}
  update: {type: "Directory?", inputBinding: {prefix: --update}}
  archive: {type: "string?", inputBinding: {prefix: --archive}}
outputs:
  update: {type: Directory, outputBinding: {glob: update}}
