//! Renders every example for every target: manifests have only fields that Kubernetes knows, settings are
//! valid for Kvasir, scripts and units are valid for their interpreters.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use control_deploy::{Graph, Rendered, Target, Workload, from_dynamo, from_toml, render};
use k8s_openapi::api::{
    apps::v1 as apps, core::v1 as core, networking::v1 as networking, policy::v1 as policy, rbac::v1 as rbac,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const EXAMPLES: [(&str, &str); 4] = [
    ("vllm", include_str!("../examples/vllm.toml")),
    ("vllm-disaggregated", include_str!("../examples/vllm-disaggregated.toml")),
    ("sglang-large", include_str!("../examples/sglang-large.toml")),
    ("mock", include_str!("../examples/mock.toml")),
];

fn graphs() -> Vec<(&'static str, Graph)> {
    let own = EXAMPLES.map(|(name, text)| (name, from_toml(text).expect(name)));
    let (dynamo, _) = from_dynamo(include_str!("../examples/dynamo.yaml")).expect("Dynamo's description");
    own.into_iter().chain([("dynamo", dynamo)]).collect()
}

fn documents(rendered: &Rendered) -> Vec<Value> {
    assert_eq!(rendered.files.len(), 1);
    // A line of a text is indented.
    let text = rendered.files[0].text.replace("\n---\n", "\n\0");
    text.split('\0')
        .filter(|text| text.lines().any(|line| !line.starts_with('#')))
        .map(|text| serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}")))
        .collect()
}

/// Reads an object with Kubernetes' own type, which skips unknown fields, and compares the type's output with
/// the object.
fn same_as<T: DeserializeOwned + Serialize>(object: &Value) {
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}\n{object:#}"));
    let written = serde_json::to_value(typed).expect("JSON");
    assert_eq!(sorted(&written), sorted(object), "a field that Kubernetes does not know");
}

/// Returns the value with sorted keys and without empty parts.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields: BTreeMap<&String, Value> =
                fields.iter().map(|(name, value)| (name, sorted(value))).collect();
            let is_empty =
                |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty) || value.is_null();
            fields
                .into_iter()
                .filter(|(_, value)| !is_empty(value))
                .map(|(name, value)| (name.clone(), value))
                .collect()
        }
        Value::Array(values) => values.iter().map(sorted).collect(),
        other => other.clone(),
    }
}

fn pods(object: &Value) -> Vec<Value> {
    let spec = &object["spec"];
    match object["kind"].as_str() {
        Some("Deployment" | "StatefulSet") => vec![spec["template"].clone()],
        Some("LeaderWorkerSet") => ["leaderTemplate", "workerTemplate"]
            .iter()
            .filter_map(|name| spec["leaderWorkerTemplate"].get(name).cloned())
            .collect(),
        Some("PodCliqueSet") => spec["template"]["cliques"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|clique| {
                serde_json::json!({
                    "metadata": {"labels": clique["labels"], "annotations": clique["annotations"]},
                    "spec": clique["spec"]["podSpec"],
                })
            })
            .collect(),
        _ => Vec::new(),
    }
}

#[test]
fn manifests_have_no_field_that_kubernetes_does_not_know() {
    let workloads =
        [Workload::Auto, Workload::StatefulSet, Workload::LeaderWorkerSet, Workload::PodCliqueSet];
    let mut kinds = BTreeMap::new();
    for (name, graph) in graphs() {
        for workload in workloads {
            let objects = match render(&graph, Target::Kubernetes(workload)) {
                Ok(files) => documents(&files),
                // Grove manages its counts itself.
                Err(error) if workload == Workload::PodCliqueSet && graph.is_planned() => {
                    assert!(error.contains("leave max out"), "{error}");
                    continue;
                }
                Err(error) => panic!("{name} {workload:?}: {error}"),
            };
            let mut workers = 0;
            for object in &objects {
                let kind = object["kind"].as_str().expect("a kind").to_owned();
                match kind.as_str() {
                    "Deployment" => same_as::<apps::Deployment>(object),
                    "StatefulSet" => same_as::<apps::StatefulSet>(object),
                    "ConfigMap" => same_as::<core::ConfigMap>(object),
                    "Service" => same_as::<core::Service>(object),
                    "ServiceAccount" => same_as::<core::ServiceAccount>(object),
                    "PodDisruptionBudget" => same_as::<policy::PodDisruptionBudget>(object),
                    "NetworkPolicy" => same_as::<networking::NetworkPolicy>(object),
                    "Role" => same_as::<rbac::Role>(object),
                    "RoleBinding" => same_as::<rbac::RoleBinding>(object),
                    "LeaderWorkerSet" | "PodCliqueSet" => {}
                    other => panic!("{name}: an object of kind {other}"),
                }
                for pod in pods(object) {
                    same_as::<core::PodTemplateSpec>(&pod);
                    let container = &pod["spec"]["containers"][0];
                    if container["name"] == "engine" && container.get("readinessProbe").is_some() {
                        let labels = &pod["metadata"]["labels"];
                        assert_eq!(labels["kvasir/graph"], graph.name.as_str());
                        assert!(labels["kvasir/generation"].as_str().is_some_and(|text| text.len() == 16));
                        workers += 1;
                    }
                }
                // The API server refuses a selector that does not match its template.
                let wanted = object["spec"]["selector"]["matchLabels"].as_object();
                let labels = &object["spec"]["template"]["metadata"]["labels"];
                for (label, value) in wanted.into_iter().flatten().filter(|_| labels.is_object()) {
                    assert_eq!(&labels[label], value, "{name} {kind} {label}");
                }
                *kinds.entry(kind).or_insert(0) += 1;
            }
            assert_eq!(
                workers,
                graph.role.len(),
                "{name} {workload:?}: each role has pods that answer requests"
            );
        }
    }
    println!("{kinds:?}");
    assert!(kinds["LeaderWorkerSet"] > 0 && kinds["PodCliqueSet"] > 0 && kinds["StatefulSet"] > 0);
}

#[test]
fn another_engine_is_another_generation_and_another_count_is_not() {
    let generation = |graph: &Graph| {
        let objects = documents(&render(graph, Target::Kubernetes(Workload::Auto)).expect("manifests"));
        let of = |object: &Value| {
            object["spec"]["template"]["metadata"]["labels"]["kvasir/generation"].as_str().map(str::to_owned)
        };
        let all: std::collections::BTreeSet<String> = objects.iter().filter_map(of).collect();
        assert_eq!(all.len(), 1, "all roles are of one generation");
        all.into_iter().next().expect("one")
    };
    let graph = from_toml(EXAMPLES[1].1).expect("a description");
    let mut more = graph.clone();
    more.role[0].max = 9;
    assert_eq!(generation(&graph), generation(&more));
    for change in [
        (|graph: &mut Graph| graph.image = "other:2".to_owned()) as fn(&mut Graph),
        |graph| graph.arguments.push("--enforce-eager".to_owned()),
        |graph| drop(graph.role[1].environment.insert("A".to_owned(), "1".to_owned())),
    ] {
        let mut other = graph.clone();
        change(&mut other);
        assert_ne!(generation(&graph), generation(&other));
    }
}

/// Rights are limited to the needed objects, by name.
#[test]
fn the_control_service_may_scale_its_workloads_and_nothing_else() {
    let graph = from_toml(EXAMPLES[1].1).expect("a description");
    let objects = documents(&render(&graph, Target::Kubernetes(Workload::Auto)).expect("manifests"));
    let role = objects
        .iter()
        .find(|object| object["kind"] == "Role" && object["metadata"]["name"] == "qwen-large-control");
    let rules = role.expect("a Role")["rules"].as_array().expect("rules").clone();
    let scaled: Vec<&str> = rules
        .iter()
        .filter(|rule| rule["resources"][0] == "deployments/scale")
        .filter_map(|rule| rule["resourceNames"][0].as_str())
        .collect();
    assert_eq!(scaled, ["qwen-large-prefill", "qwen-large-decode"]);
    let verbs = |rule: &Value| {
        rule["verbs"].as_array().is_some_and(|verbs| verbs.iter().any(|verb| verb == "*" || verb == "delete"))
    };
    assert!(!rules.iter().any(verbs), "{rules:?}");
}

fn sh_reads(text: &str) {
    use std::io::Write;
    let mut shell = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn().expect("sh");
    shell.stdin.take().expect("stdin").write_all(text.as_bytes()).expect("it reads");
    assert!(shell.wait().expect("it ends").success(), "{text}");
}

#[test]
fn one_machine_gets_scripts_units_and_a_compose_file() {
    for (name, mut graph) in graphs() {
        let several = graph.role.iter().any(|spec| spec.nodes > 1);
        for target in [Target::Compose, Target::Systemd, Target::Processes] {
            if graph.gateway.replicas > 1 {
                assert!(render(&graph, target).expect_err(name).contains("replicas"));
            }
        }
        graph.gateway.replicas = 1;
        if several {
            assert!(render(&graph, Target::Compose).expect_err(name).contains("nodes"));
            continue;
        }
        let workers: u32 = graph.role.iter().map(control_deploy::RoleSpec::count).sum();
        let script = render(&graph, Target::Processes).expect(name);
        sh_reads(&script.files[0].text);
        assert_eq!(script.files[0].text.matches("pids=\"$pids $!\"").count(), workers as usize + 1);
        let compose = documents(&render(&graph, Target::Compose).expect(name)).remove(0);
        assert_eq!(
            compose["services"].as_object().expect("services").len(),
            workers as usize + 1,
            "{compose:#}"
        );
        let settings = compose["configs"]["kvasir"]["content"].as_str().expect("settings").replace("$$", "$");
        assert!(control_config::parse(&settings).is_ok(), "{settings}");
        let units = render(&graph, Target::Systemd).expect(name).files;
        assert_eq!(units.len(), workers as usize + 3);
        let services = units.iter().filter(|unit| unit.name.ends_with(".service"));
        for unit in services {
            let start = unit.text.lines().find(|line| line.starts_with("ExecStart=")).expect("a command");
            assert!(start.starts_with("ExecStart=\"/usr/bin/env\" \""), "{start}");
        }
    }
}

/// Blanks, quotes, dollars and percents of an argument reach the engine unchanged.
#[test]
fn arguments_mean_themselves_everywhere() {
    let odd = "a 'b' \"c\" $HOME %n \\ `d`";
    let mut graph = from_toml(EXAMPLES[3].1).expect("a description");
    graph.role[0].arguments = vec!["--odd".to_owned(), odd.to_owned()];
    let script = &render(&graph, Target::Processes).expect("a script").files[0].text;
    // The script's own line, with the engine replaced by a program that prints its last argument.
    let line = script.lines().find(|line| line.contains("--odd")).expect("a line").replace(" &", "");
    let printed = Command::new("sh")
        .args([
            "-c",
            &format!(
                "kvasir=last; last() {{ shift $(($# - 1)); printf %s \"$1\"; }}; {}",
                line.replace("\"$kvasir\"", "last")
            ),
        ])
        .output()
        .expect("sh");
    assert_eq!(String::from_utf8_lossy(&printed.stdout), odd, "{line}");
    let units = render(&graph, Target::Systemd).expect("units").files;
    let unit = units.iter().find(|unit| unit.text.contains("--odd")).expect("a unit");
    assert!(unit.text.contains(r#""a 'b' \"c\" $$HOME %%n \\ `d`""#), "{}", unit.text);
    let compose = documents(&render(&graph, Target::Compose).expect("a file")).remove(0);
    let command = compose["services"]["prefill-0"]["entrypoint"].as_array().expect("words").clone();
    assert_eq!(command.last().and_then(Value::as_str), Some(odd.replace('$', "$$").as_str()));
    let objects = documents(&render(&graph, Target::Kubernetes(Workload::Auto)).expect("manifests"));
    let said = objects.iter().flat_map(pods).find_map(|pod| {
        let command = pod["spec"]["containers"][0]["command"].as_array()?.clone();
        command.iter().any(|word| word == "--odd").then(|| command.last().cloned())?
    });
    // The kubelet replaces two dollars with one, and `$(NAME)` with a variable's value.
    assert_eq!(said.as_ref().and_then(Value::as_str), Some(odd.replace('$', "$$").as_str()));
}

/// A description from an untrusted author must not become another command, unit or object.
#[test]
fn settings_and_texts_stay_what_they_are() {
    let hostile = "x\nEND\ntouch /tmp/kvasir-hostile\n'\"$(touch /tmp/kvasir-hostile)`\n---\nkind: Evil\n{{ .Values.image }}\n";
    let mut graph = from_toml(EXAMPLES[3].1).expect("a description");
    let file = serde_json::json!({"engine_key_file": hostile});
    graph.gateway.settings.insert("gateway".to_owned(), file);
    let script = &render(&graph, Target::Processes).expect("a script").files[0].text;
    // Runs the script up to the first process, which writes the settings; then the settings are printed.
    let (head, _) =
        script.split_once("\nVLLM").or_else(|| script.split_once("\n\"$kvasir\"")).expect("a process");
    let printed = Command::new("sh")
        .args(["-c", &format!("{head}\ncat \"$folder/kvasir.toml\"")])
        .output()
        .expect("sh");
    let settings = control_config::parse(&String::from_utf8_lossy(&printed.stdout)).expect("settings");
    assert_eq!(settings.gateway.engine_key_file, hostile);
    assert!(!std::path::Path::new("/tmp/kvasir-hostile").exists());
    for target in [Target::Kubernetes(Workload::Auto), Target::Compose] {
        let kinds: Vec<Value> = documents(&render(&graph, target).expect("a file"))
            .iter()
            .map(|object| object["kind"].clone())
            .collect();
        assert!(!kinds.contains(&Value::from("Evil")), "{kinds:?}");
    }
    let chart = render(&graph, Target::Helm(Workload::Auto)).expect("a chart").files;
    let text = &chart.iter().find(|file| file.name == "templates/graph.yaml").expect("it").text;
    assert!(text.contains("{{ \"{{\" }} .Values.image }}"), "{text}");
    graph.role[0].arguments = vec!["kvasir-value-image".to_owned()];
    assert!(render(&graph, Target::Helm(Workload::Auto)).expect_err("a mark").contains("kvasir-value-"));
}

/// A real API server refuses a field that a kind does not have, even if it is null.
#[test]
fn no_object_has_a_field_without_a_value() {
    for (name, text) in EXAMPLES {
        let graph = from_toml(text).expect("a description");
        for target in [Target::Kubernetes(Workload::Auto), Target::Helm(Workload::Auto)] {
            let files = render(&graph, target).expect("a rendering").files;
            for file in files.iter().filter(|file| file.name.ends_with(".yaml")) {
                let empty = file.text.lines().find(|line| line.trim_end().ends_with(": null"));
                assert_eq!(empty, None, "{name}: {}", file.name);
            }
        }
    }
}

#[test]
fn what_does_not_fit_a_target_is_refused_or_told() {
    let refused = |change: fn(&mut Graph), target, expected: &str| {
        let mut graph = from_toml(EXAMPLES[3].1).expect("a description");
        change(&mut graph);
        let said = render(&graph, target).expect_err(expected);
        assert!(said.contains(expected), "{said}");
    };
    let manifests = Target::Kubernetes(Workload::Auto);
    refused(|graph| graph.gateway.port = 9090, manifests, "port 9090 is for administrators");
    refused(|graph| graph.gateway.port = 9100, Target::Systemd, "are the workers'");
    refused(|graph| graph.image = "engine:latest".to_owned(), manifests, "names no version");
    refused(|graph| graph.name = "n".repeat(40), Target::Kubernetes(Workload::PodCliqueSet), "letters less");
    // Mock engines use no GPU.
    let graph = from_toml(EXAMPLES[3].1).expect("a description");
    assert!(!render(&graph, manifests).expect("manifests").files[0].text.contains("nvidia.com/gpu"));
    let mut graph = from_toml(EXAMPLES[1].1).expect("a description");
    graph.gateway.replicas = 1;
    let unused = render(&graph, Target::Processes).expect("a script").unused;
    for field in
        ["secrets", "storage", "role prefill: max", "role prefill: resources", "role prefill: placement"]
    {
        assert!(unused.iter().any(|said| said == field), "{field}: {unused:?}");
    }
    assert_eq!(render(&graph, manifests).expect("manifests").unused, Vec::<String>::new());
    // A picker's port is in the pod, the Service and the NetworkPolicy.
    graph.gateway.settings.insert("picker".to_owned(), serde_json::json!({"listen": "0.0.0.0:9002"}));
    let text = &render(&graph, manifests).expect("manifests").files[0].text;
    assert_eq!(text.matches("9002").count(), 4, "settings, container and two Services: {text}");
}

#[test]
fn other_settings_are_other_pods() {
    let hashes = |graph: &Graph| -> Vec<String> {
        let objects = documents(&render(graph, Target::Kubernetes(Workload::Auto)).expect("manifests"));
        let of = |object: &Value| {
            object["spec"]["template"]["metadata"]["annotations"]["kvasir/settings"]
                .as_str()
                .map(str::to_owned)
        };
        objects.iter().filter_map(of).collect()
    };
    let graph = from_toml(EXAMPLES[1].1).expect("a description");
    let mut other = graph.clone();
    other.role[1].max += 1;
    let (before, after) = (hashes(&graph), hashes(&other));
    assert_eq!(before.len(), 2, "gateways and the control service");
    assert!(before[0] == after[0] && before[1] != after[1], "{before:?} {after:?}");
}

#[test]
fn the_documented_example_is_a_description() {
    let readme = include_str!("../README.md");
    let (_, example) = readme.split_once("```toml\n# qwen.toml\n").expect("the example");
    let (example, _) = example.split_once("```").expect("its end");
    let graph = from_toml(example).expect("a description");
    assert_eq!(graph.gpus_max(), 4);
    let rendered = render(&graph, Target::Kubernetes(Workload::Auto)).expect("manifests");
    for needed in [
        "Secret qwen-peers",
        "Secret hf-token",
        "PersistentVolumeClaim models",
        "registry.example/kvasir:0.1.0",
    ] {
        assert!(rendered.needs.iter().any(|need| need.contains(needed)), "{needed}: {:?}", rendered.needs);
    }
}

/// systemd's own parser accepts the units.
#[test]
fn systemd_finds_no_mistake_in_the_units() {
    if !Command::new("systemd-analyze").arg("--version").output().is_ok_and(|output| output.status.success())
    {
        eprintln!("SKIPPED: no systemd-analyze");
        return;
    }
    for (name, mut graph) in
        graphs().into_iter().filter(|(_, graph)| graph.role.iter().all(|spec| spec.nodes == 1))
    {
        graph.gateway.replicas = 1;
        graph.role[0].arguments.push("a 'b' \"c\" $HOME %n \\ ; x".to_owned());
        let folder = std::env::temp_dir().join(format!("kvasir-units-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let units = render(&graph, Target::Systemd).expect(name).files;
        let units: Vec<_> = units.iter().filter(|unit| !unit.name.ends_with(".toml")).collect();
        let paths: Vec<_> = units.iter().map(|unit| folder.join(&unit.name)).collect();
        for (unit, path) in units.iter().zip(&paths) {
            std::fs::write(path, &unit.text).expect("a file");
        }
        let verified = Command::new("systemd-analyze").arg("verify").args(&paths).output().expect("it runs");
        let _removed = std::fs::remove_dir_all(&folder);
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        // Warnings about other units of the machine are ignored.
        let ours: Vec<&str> = said.lines().filter(|line| line.contains(&graph.name)).collect();
        assert!(ours.is_empty(), "{name}: {ours:?}");
    }
}
