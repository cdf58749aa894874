//! Fields of a description that a target does not use.

use crate::graph::{Gateway, Graph};

/// Returns the fields that are set and not among `used`.
pub(crate) fn unused(graph: &Graph, used: &[&str]) -> Vec<String> {
    let usual = Gateway::default();
    let mut said = vec![
        ("secrets".to_owned(), !graph.secrets.is_empty()),
        ("storage".to_owned(), !graph.storage.is_empty()),
        ("image".to_owned(), !graph.image.is_empty()),
        ("gateway.image".to_owned(), graph.gateway.image != usual.image),
        ("gateway.secrets".to_owned(), !graph.gateway.secrets.is_empty()),
    ];
    for spec in &graph.role {
        let fields = [
            ("cpu", !spec.cpu.is_empty()),
            ("memory", !spec.memory.is_empty()),
            ("resources", !spec.resources.is_empty()),
            ("placement", !spec.placement.is_empty()),
            ("max", spec.is_planned()),
        ];
        let name = |field| format!("role {}: {field}", spec.role.name());
        said.extend(
            fields
                .into_iter()
                .filter(|(field, _)| !used.contains(field))
                .map(|(field, is)| (name(field), is)),
        );
    }
    said.retain(|(field, is_said)| *is_said && !used.contains(&field.as_str()));
    said.into_iter().map(|(field, _)| field).collect()
}

/// Formats lines as a comment.
pub(crate) fn comment(title: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines: Vec<String> = lines.iter().map(|line| format!("#   {line}\n")).collect();
    format!("# {title}\n{}", lines.concat())
}
