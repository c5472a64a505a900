cwlVersion: v1.2
class: Workflow
doc: A federation. Start (or resume), rounds until the coordinator says stop, a report.
$namespaces: {cwltool: "http://commonwl.org/cwltool#"}
requirements: {SubworkflowFeatureRequirement: {}}
inputs:
  federation: {type: File, doc: "coordinator.json: what the coordinator's steps need to know"}
  archive: {type: string, doc: "directory on the coordinator that outlives the run; text, so that no engine stages it"}
  model: {type: Directory, doc: "the initial Hugging Face checkpoint; used when the archive is empty"}
  facilities:
    doc: One record a facility, in the order of round.cwl's steps. `dataset` is text, so that no engine can move the data.
    type:
      type: array
      items: {type: record, name: facility, fields: {name: string, dataset: string, settings: File}}
outputs:
  summary: {type: File, outputSource: report/summary}
steps:
  start:
    run: tools/start.cwl
    in: {federation: federation, archive: archive, model: model}
    out: [model, round, proceed]
  rounds:
    run: round.cwl
    in:
      federation: federation
      archive: archive
      facilities: facilities
      model: start/model
      round: start/round
      proceed: start/proceed
    out: [model, round, proceed]
    requirements:
      cwltool:Loop:
        loopWhen: $(inputs.proceed)
        loop: {model: model, round: round, proceed: proceed}
        outputMethod: last
  report:
    run: tools/report.cwl
    in: {federation: federation, archive: archive, after: rounds/round}
    out: [summary]
