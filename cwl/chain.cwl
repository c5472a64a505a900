cwlVersion: v1.2
class: Workflow
doc: One round of one facility by itself - it trains, its update is received, and it meets those that are there.
inputs:
  federation: File
  archive: string
  facility: string
  dataset: {type: string, doc: "text, so that no engine can move the data"}
  settings: File
  model: Directory
  round: int
  proceed: boolean
outputs:
  model: {type: Directory, outputSource: meet/model}
  round: {type: int, outputSource: meet/round}
  proceed: {type: boolean, outputSource: meet/proceed}
steps:
  train:
    run: tools/train.cwl
    in: {model: model, round: round, dataset: dataset, settings: settings}
    out: [update]
  receive:
    run: tools/receive.cwl
    in: {federation: federation, model: model, round: round, facility: facility, update: train/update}
    out: [update]
  meet:
    run: tools/meet.cwl
    in: {federation: federation, archive: archive, facility: facility, model: model, round: round, update: receive/update}
    out: [model, round, proceed]
