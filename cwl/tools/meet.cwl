cwlVersion: v1.2
class: CommandLineTool
doc: Announce a facility's update, wait until its group has been averaged, and tell where the facility goes on.
baseCommand: [python3, -m, coordinator.asynchronous.submit]
requirements:
  # It waits: with the cores that an engine keeps for a step, those who wait would keep out the one they wait for.
  ResourceRequirement: {coresMin: 0, ramMin: 0, tmpdirMin: 0, outdirMin: 0}
inputs:
  federation: {type: File, inputBinding: {prefix: --federation}}
  archive: {type: string, inputBinding: {prefix: --archive}}
  facility: {type: string, inputBinding: {prefix: --facility}}
  model: {type: "Directory?", inputBinding: {prefix: --model}}
  round: {type: "int?", inputBinding: {prefix: --round}}
  update: {type: "Directory?", inputBinding: {prefix: --update}}
  after: {type: "int?", doc: "only orders this step after the start"}
outputs: {model: Directory, round: int, proceed: boolean}
