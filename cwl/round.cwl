# Rendered by `crossfed render` from federation.yml: edit that file and render again.
cwlVersion: v1.2
class: Workflow
doc: 'One round: each facility trains and its update is received as soon as it is ready; then the updates are averaged.'
requirements:
  MultipleInputFeatureRequirement: {}
  StepInputExpressionRequirement: {}
inputs:
  federation: File
  archive: string
  model: Directory
  round: int
  proceed: boolean
  facilities:
    type:
      type: array
      items:
        type: record
        name: facility
        fields:
          name: string
          dataset: string
          settings: File
outputs:
  model:
    type: Directory
    outputSource: aggregate/model
  round:
    type: int
    outputSource: aggregate/round
  proceed:
    type: boolean
    outputSource: aggregate/proceed
steps:
  train_stdlib:
    run: tools/train.cwl
    in:
      model: model
      round: round
      dataset:
        source: facilities
        valueFrom: $(self[0].dataset)
      settings:
        source: facilities
        valueFrom: $(self[0].settings)
    out:
    - update
  receive_stdlib:
    run: tools/receive.cwl
    in:
      federation: federation
      model: model
      round: round
      facility:
        source: facilities
        valueFrom: $(self[0].name)
      update: train_stdlib/update
    out:
    - update
  train_manual:
    run: tools/train.cwl
    in:
      model: model
      round: round
      dataset:
        source: facilities
        valueFrom: $(self[1].dataset)
      settings:
        source: facilities
        valueFrom: $(self[1].settings)
    out:
    - update
  receive_manual:
    run: tools/receive.cwl
    in:
      federation: federation
      model: model
      round: round
      facility:
        source: facilities
        valueFrom: $(self[1].name)
      update: train_manual/update
    out:
    - update
  aggregate:
    run: tools/aggregate.cwl
    in:
      federation: federation
      archive: archive
      model: model
      round: round
      updates:
        source:
        - receive_stdlib/update
        - receive_manual/update
        linkMerge: merge_flattened
    out:
    - model
    - round
    - proceed
