//! Kubernetes manifests as a Helm chart.
//!
//! The chart holds the manifests of one graph, and values for the parts that change from release to release:
//! the two images and the numbers of workers that the planner does not set. Everything else is changed in the
//! description, so that only `kubernetes` defines the objects of a graph.

use serde_json::{Map, Value, json};

use crate::graph::Graph;
use crate::kubernetes::{Workload, needs, objects};
use crate::{File, Rendered, yaml};

/// Placeholder that a Helm template replaces after the manifests have become YAML.
const MARK: &str = "kvasir-value-";

/// Returns the mark of a value of the chart, which its template replaces.
fn mark(name: &str) -> String {
    format!("{MARK}{name}")
}

pub(crate) fn render(graph: &Graph, workload: Workload) -> Result<Rendered, String> {
    if graph.mentions(MARK) {
        return Err(format!(
            "a text of the description has {MARK:?} in it, which stands for the chart's values"
        ));
    }
    graph.check_version()?;
    let mut marked = graph.clone();
    // The marks contain a version, because images must have one.
    marked.image = mark("image:0");
    marked.gateway.image = mark("gateway");
    let mut objects = objects(&marked, workload)?;
    let mut counts = Map::new();
    for spec in graph.role.iter().filter(|spec| !spec.is_planned()) {
        let role = spec.role.name();
        for object in &mut objects {
            if let Some(count) = count_of(object, &graph.name, role) {
                *count = mark(role).into();
                counts.insert(role.to_owned(), spec.count().into());
            }
        }
    }
    let mut generation = None;
    objects.iter_mut().for_each(|object| mark_generation(object, &mut generation));
    // Braces in arguments must not become templates.
    let mut text = yaml::documents(&objects)?.replace("{{", "{{ \"{{\" }}");
    let mut put = |name: &str, template: &str| {
        text = text.replace(&mark(name), template);
    };
    put("image:0", "{{ .Values.image | quote }}");
    put("gateway", "{{ .Values.gateway.image | quote }}");
    for role in counts.keys() {
        put(role, &format!("{{{{ .Values.workers.{role} }}}}"));
    }
    if let Some(generation) = generation {
        // A changed image changes the generation as well.
        let template = format!(
            "{{{{ printf \"%s %s\" \"{generation}\" .Values.image | sha256sum | trunc 16 | quote }}}}"
        );
        put("generation", &template);
    }
    let image = graph.worker_image();
    let mut values = json!({"image": image, "gateway": {"image": graph.gateway.image}});
    let text_schema = json!({"type": "string", "minLength": 1});
    let mut properties = json!({
        "global": {"type": "object"}, "image": text_schema,
        "gateway": {"type": "object", "additionalProperties": false, "properties": {"image": text_schema}},
    });
    if !counts.is_empty() {
        let count = json!({"type": "integer", "minimum": 1, "maximum": 10_000});
        let named: Map<String, Value> = counts.keys().map(|role| (role.clone(), count.clone())).collect();
        properties["workers"] = json!({"type": "object", "additionalProperties": false, "properties": named});
        values["workers"] = counts.into();
    }
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": false,
        "properties": properties,
    });
    let version = env!("CARGO_PKG_VERSION");
    let chart = json!({
        "apiVersion": "v2", "name": graph.name, "version": version, "appVersion": version, "type": "application",
        "description": format!("{} behind Kvasir", graph.served_name()),
    });
    let needs = needs(graph, workload);
    let lines: Vec<String> =
        needs.iter().map(|need| format!("  {}\n", need.replace("{{", "{{ \"{{\" }}"))).collect();
    let notes = format!("What must be there, in this namespace:\n{}", lines.concat());
    let schema = serde_json::to_string_pretty(&schema).map_err(|error| error.to_string())? + "\n";
    let file = |name: &str, text: String| File { name: name.to_owned(), text };
    let files = vec![
        file("Chart.yaml", yaml::document(&chart)?),
        file("values.yaml", yaml::document(&values)?),
        file("values.schema.json", schema),
        file("templates/NOTES.txt", notes),
        file("templates/graph.yaml", text),
    ];
    Ok(Rendered { files, needs, unused: Vec::new() })
}

/// Returns the number of workers of a role, in the role's own object or in a PodCliqueSet.
fn count_of<'a>(object: &'a mut Value, graph: &str, role: &str) -> Option<&'a mut Value> {
    if object["kind"] != "PodCliqueSet" {
        let is_roles = object["metadata"]["name"] == format!("{graph}-{role}").as_str();
        // Indexing would insert a null into objects without a spec, which a real API server refuses.
        return object.get_mut("spec")?.get_mut("replicas").filter(|_| is_roles);
    }
    let template = object.get_mut("spec")?.get_mut("template")?;
    let has_group = template["podCliqueScalingGroups"]
        .as_array()
        .is_some_and(|all| all.iter().any(|group| group["name"] == role));
    let list = if has_group { "podCliqueScalingGroups" } else { "cliques" };
    let part = template[list].as_array_mut()?.iter_mut().find(|part| part["name"] == role)?;
    let part = if has_group { part } else { &mut part["spec"] };
    part.get_mut("replicas")
}

/// Replaces every generation label with a mark, and returns the original value in `generation`.
fn mark_generation(value: &mut Value, generation: &mut Option<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == "kvasir/generation" => {
                        generation.get_or_insert_with(|| text.clone());
                        *text = mark("generation");
                    }
                    other => mark_generation(other, generation),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| mark_generation(value, generation)),
        _ => {}
    }
}
