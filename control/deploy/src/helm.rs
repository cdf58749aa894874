//! The manifests of Kubernetes as a Helm chart.
//!
//! The chart holds the manifests of one graph, and values for what changes from release to release: the two images and the
//! numbers of workers that the planner does not set. Everything else is changed in the description. So there is one place that
//! knows how a graph looks in a cluster.

use serde_json::{Map, Value, json};

use crate::graph::Graph;
use crate::kubernetes::{Workload, needs, objects};
use crate::{File, yaml};

/// Text that stands for a template until the manifests are YAML.
const MARK: &str = "kvasir-value-";

/// A value of the chart: its mark, and the template that takes the mark's place.
fn mark(name: &str) -> String {
    format!("{MARK}{name}")
}

pub(crate) fn render(graph: &Graph, workload: Workload) -> Result<Vec<File>, String> {
    let mut marked = graph.clone();
    marked.image = mark("image");
    marked.gateway.image = mark("gateway");
    let mut objects = objects(&marked, workload)?;
    let mut counts = Map::new();
    for spec in graph.role.iter().filter(|spec| !spec.is_planned()) {
        let name = format!("{}-{}", graph.name, spec.role.name());
        for object in objects.iter_mut().filter(|object| object["metadata"]["name"] == name.as_str()) {
            if object["spec"].get("replicas").is_some() {
                object["spec"]["replicas"] = mark(spec.role.name()).into();
                counts.insert(spec.role.name().to_owned(), spec.workers.into());
            }
        }
    }
    let mut generation = None;
    objects.iter_mut().for_each(|object| mark_generation(object, &mut generation));
    // Braces of arguments are no templates.
    let mut text = yaml::documents(&objects)?.replace("{{", "{{ \"{{\" }}");
    let mut put = |name: &str, template: &str| {
        text = text.replace(&mark(name), template);
    };
    put("image", "{{ .Values.image | quote }}");
    put("gateway", "{{ .Values.gateway.image | quote }}");
    for role in counts.keys() {
        put(role, &format!("{{{{ .Values.workers.{role} }}}}"));
    }
    if let Some(generation) = generation {
        // Another image is another generation, too.
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
    let needs: Vec<String> = needs(graph, workload)
        .iter()
        .map(|need| format!("  {}\n", need.replace("{{", "{{ \"{{\" }}")))
        .collect();
    let notes = format!("{} needs, in this namespace:\n{}", graph.name, needs.concat());
    let schema = serde_json::to_string_pretty(&schema).map_err(|error| error.to_string())? + "\n";
    let file = |name: &str, text: String| File { name: name.to_owned(), text };
    Ok(vec![
        file("Chart.yaml", yaml::document(&chart)?),
        file("values.yaml", yaml::document(&values)?),
        file("values.schema.json", schema),
        file("templates/NOTES.txt", notes),
        file("templates/graph.yaml", text),
    ])
}

/// Marks every label of the generation, and keeps what it was.
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
