//! Descriptions in the format of Dynamo's examples.

use super::*;

const SERVICES: &str = include_str!("../../examples/dynamo.yaml");

fn noted(notes: &[Note], field: &str) -> (bool, String) {
    let found = notes.iter().find(|note| note.field == field);
    let note = found.unwrap_or_else(|| panic!("no note of {field} in {notes:#?}"));
    (note.is_taken, note.text.clone())
}

#[test]
fn services_become_roles_and_every_field_is_told() {
    let (graph, notes) = from_dynamo(SERVICES).expect("a graph");
    assert_eq!((graph.name.as_str(), graph.engine, graph.gateway.replicas), ("qwen-disagg", Engine::Vllm, 2));
    assert_eq!(
        (graph.model.as_str(), graph.image.as_str()),
        ("Qwen/Qwen3-32B", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1")
    );
    assert_eq!(graph.environment, [("HF_HOME".to_owned(), "/models".to_owned())].into());
    assert_eq!(graph.secrets, ["hf-token-secret"]);
    assert_eq!((graph.storage[0].path.as_str(), graph.storage[0].claim.as_str()), ("/models", "model-cache"));
    let [prefill, decode] = graph.role.as_slice() else { panic!("{:?}", graph.role) };
    assert_eq!(
        (prefill.role, prefill.workers, prefill.gpus, prefill.nodes),
        (Role::Prefill, Some(3), Some(2), 1)
    );
    assert_eq!((prefill.cpu.as_str(), prefill.memory.as_str()), ("8", "64Gi"));
    assert_eq!(prefill.resources, [("rdma/ib".to_owned(), "2".to_owned())].into());
    assert_eq!(prefill.placement, [("gpu".to_owned(), "h100".to_owned())].into());
    assert_eq!(prefill.arguments, ["--max-model-len", "32768"]);
    assert_eq!((decode.role, decode.gpus, decode.nodes), (Role::Decode, Some(4), 2));
    assert_eq!(
        decode.arguments,
        ["--tensor-parallel-size=8", "--speculative-config", "{\"method\": \"ngram\"}"]
    );
    let worker = "spec.services.VllmPrefillWorker";
    for (field, is_taken, text) in [
        ("metadata.name".to_owned(), true, "name"),
        ("metadata.namespace".to_owned(), false, "--namespace"),
        ("spec.envs[DYN_LOG]".to_owned(), false, "Dynamo's own"),
        ("spec.services.Planner.componentType".to_owned(), false, "kvasir control"),
        (format!("{worker}.sharedMemory"), false, "16 GiB"),
        (format!("{worker}.livenessProbe"), false, "/health"),
        (format!("{worker}.extraPodSpec.tolerations"), false, "no equivalent"),
        (format!("{worker}.extraPodSpec.mainContainer.workingDir"), false, "folders"),
        (format!("{worker}.extraPodSpec.mainContainer.args[--connector]"), false, "Dynamo reads it"),
        (format!("{worker}.extraPodSpec.mainContainer.args[--max-model-len]"), true, "role.arguments"),
        (format!("{worker}.resources.limits.custom.rdma/ib"), true, "role.resources"),
        ("spec.services.VllmDecodeWorker.scalingAdapter".to_owned(), false, "max"),
    ] {
        let (was_taken, said) = noted(&notes, &field);
        assert!(was_taken == is_taken && said.contains(text), "{field}: {was_taken} {said}");
    }
}

#[test]
fn components_and_other_engines_are_read_as_well() {
    let text = r#"
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: { name: sglang }
spec:
  components:
    - name: frontend
      type: frontend
    - name: worker
      type: decode
      replicas: 2
      sharedMemorySize: "0"
      podTemplate:
        spec:
          volumes:
            - { name: cache, persistentVolumeClaim: { claimName: models } }
            - { name: scratch, emptyDir: {} }
          containers:
            - name: main
              image: sglang:1
              command: [python3]
              args: [-m, dynamo.sglang, --model-path, /models/q, --served-model-name, q, --tp, "4", --skip-tokenizer-init,
                     --disaggregation-mode, decode, --disaggregation-transfer-backend, nixl]
              resources: { limits: { nvidia.com/gpu: 4, rdma/ib: 4 } }
              volumeMounts: [{ name: cache, mountPath: /models }, { name: scratch, mountPath: /tmp }]
            - name: sidecar
    - name: prefill
      type: prefill
      podTemplate:
        spec:
          containers:
            - { name: main, image: "sglang:1", args: [-m, dynamo.sglang, --model-path, /models/q] }
"#;
    let (graph, notes) = from_dynamo(text).expect("a graph");
    assert_eq!(
        (graph.engine, graph.model.as_str(), graph.alias.as_str()),
        (Engine::Sglang, "/models/q", "q")
    );
    let decode = &graph.role[1];
    assert_eq!(
        (decode.workers, decode.gpus, decode.arguments.join(" ")),
        (Some(2), Some(4), "--tp 4".to_owned())
    );
    assert_eq!(
        graph.storage,
        [Storage { path: "/models".into(), claim: "models".into(), folder: String::new() }]
    );
    let pod = "spec.components.worker.podTemplate.spec";
    for (field, is_taken) in [
        (format!("{pod}.volumes[scratch]"), false),
        (format!("{pod}.containers[sidecar]"), false),
        (format!("{pod}.containers[main].args[--skip-tokenizer-init]"), false),
        (format!("{pod}.containers[main].args[--disaggregation-transfer-backend]"), false),
        (format!("{pod}.containers[main].volumeMounts[cache]"), true),
        ("spec.components.worker.sharedMemorySize".to_owned(), false),
    ] {
        assert_eq!(noted(&notes, &field).0, is_taken, "{field}");
    }
    let trtllm = text.replace("dynamo.sglang", "dynamo.trtllm").replace("--tp,", "--tensor-parallel-size,");
    let (graph, _) = from_dynamo(&trtllm).expect("a graph");
    assert_eq!(
        (graph.engine, graph.role[1].arguments.join(" ")),
        (Engine::TensorrtLlm, "--tp_size 4".to_owned())
    );
}

#[test]
fn what_no_graph_can_be_made_of_is_refused_with_the_reason() {
    let with = |spec: &str| {
        from_dynamo(&format!("kind: DynamoGraphDeployment\nmetadata: {{ name: a }}\nspec:\n{spec}"))
            .expect_err(spec)
    };
    assert!(from_dynamo("kind: Pod\n").expect_err("a Pod").contains("DynamoGraphDeployment"));
    assert!(from_dynamo("kind: [\n").is_err());
    assert!(with("  services: {}\n").contains("no worker"));
    let worker = "{ componentType: worker, extraPodSpec: { mainContainer: { image: x, args: [-m, dynamo.vllm, --model, m] } } }";
    assert!(with(&format!("  services:\n    a: {worker}\n    b: {worker}\n")).contains("several workers"));
    let unknown = worker.replace("dynamo.vllm", "dynamo.mocker");
    let text = format!(
        "kind: DynamoGraphDeployment\nmetadata: {{ name: a }}\nspec:\n  services:\n    a: {unknown}\n"
    );
    let (graph, _) = from_dynamo(&text).expect("a graph without a model");
    assert!(graph.check().expect_err("no model").contains("model: "));
}

/// Commands around an engine in a script are not options of the engine; unknown variables are reported.
#[test]
fn scripts_are_read_up_to_their_next_command() {
    let text = r#"
kind: DynamoGraphDeployment
metadata: { name: a }
spec:
  services:
    w:
      componentType: worker
      replicas: 0
      extraPodSpec:
        mainContainer:
          image: x:1
          command: [bash, -c]
          args: ["cd /w && exec python3 -m dynamo.vllm --model $MODEL --max-model-len 4096 2>&1 | tee /tmp/log"]
"#;
    let (graph, notes) = from_dynamo(text).expect("a graph");
    assert_eq!(graph.role[0].arguments, ["--max-model-len", "4096"]);
    assert_eq!(graph.role[0].workers, Some(1));
    let container = "spec.services.w.extraPodSpec.mainContainer";
    let left = notes.iter().filter(|note| !note.is_taken && note.field.starts_with(container)).count();
    assert!(left >= 2, "{notes:#?}");
    assert!(!noted(&notes, "spec.services.w.replicas").0);
}
