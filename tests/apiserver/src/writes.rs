//! Get, create, update, patch and delete of one object, and of its `scale` and `status`.
//!
//! An update or patch with a resource version is refused with 409 if the object has another version
//! ("Kubernetes API Concepts", "Updates to existing resources"). Patches are JSON merge patches (RFC 7396)
//! and simplified server-side apply: the applied object is merged into the existing one, or created.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::access::Call;
use crate::store::Store;

/// Reason for which a call is refused, in the form of `metav1.Status`.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: StatusCode,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

fn refusal(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Refusal {
    Refusal { code, reason, message: message.into() }
}

/// Merges a patch into a value according to RFC 7396.
pub(crate) fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (key, change) in patch {
        if change.is_null() {
            value.as_object_mut().map(|members| members.remove(key));
        } else {
            merge(&mut value[key], change);
        }
    }
}

/// Carries out a call; returns the object of the answer.
pub(crate) fn carry_out(
    store: &mut Store,
    call: &Call,
    resource: &str,
    subresource: Option<&str>,
    body: &[u8],
) -> Result<Value, Refusal> {
    let body = || {
        serde_json::from_slice::<Value>(body)
            .map_err(|error| refusal(StatusCode::BAD_REQUEST, "BadRequest", error.to_string()))
    };
    let namespace = call.namespace.as_str();
    let Some(name) = call.name.as_deref() else {
        let mut object = body()?;
        object["metadata"]["namespace"] = json!(namespace);
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() {
            return Err(refusal(
                StatusCode::UNPROCESSABLE_ENTITY,
                "Invalid",
                "metadata.name: Required value",
            ));
        }
        if store.get(resource, namespace, &name).is_some() {
            let message = format!("{resource} {name:?} already exists");
            return Err(refusal(StatusCode::CONFLICT, "AlreadyExists", message));
        }
        return Ok(store.put(resource, object));
    };
    let known = store.get(resource, namespace, name).cloned();
    let is_applied = call.verb == "patch" && subresource.is_none() && known.is_none();
    let Some(known) =
        known.or_else(|| is_applied.then(|| json!({"metadata": {"name": name, "namespace": namespace}})))
    else {
        return Err(refusal(StatusCode::NOT_FOUND, "NotFound", format!("{resource} {name:?} not found")));
    };
    match call.verb {
        "get" if subresource == Some("scale") => Ok(scale(&known)),
        "get" => Ok(known),
        "delete" => {
            store.delete(resource, namespace, name);
            Ok(known)
        }
        _ => {
            let change = body()?;
            let asked = &change["metadata"]["resourceVersion"];
            if asked.as_str().is_some_and(|asked| !asked.is_empty())
                && *asked != known["metadata"]["resourceVersion"]
            {
                let message = format!(
                    "Operation cannot be fulfilled on {resource} {name:?}: the object has been modified"
                );
                return Err(refusal(StatusCode::CONFLICT, "Conflict", message));
            }
            let mut object = known.clone();
            match (call.verb, subresource) {
                (_, Some("scale")) => {
                    let replicas = change["spec"]["replicas"].as_u64();
                    let replicas = replicas.ok_or_else(|| {
                        refusal(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", "spec.replicas: Required value")
                    })?;
                    object["spec"]["replicas"] = json!(replicas);
                }
                (_, Some("status")) => merge(&mut object["status"], &change["status"]),
                ("patch", _) => merge(&mut object, &change),
                _ => {
                    object = change;
                    object["metadata"]["uid"] = known["metadata"]["uid"].clone();
                }
            }
            // An update without a difference creates no new version.
            let object = if object == known { known } else { store.put(resource, object) };
            Ok(if subresource == Some("scale") { scale(&object) } else { object })
        }
    }
}

/// The `scale` subresource: `autoscaling/v1`, "Scale".
fn scale(object: &Value) -> Value {
    let labels = object["spec"]["selector"]["matchLabels"].as_object();
    let labels: Vec<String> = labels
        .into_iter()
        .flatten()
        .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()))
        .collect();
    // LeaderWorkerSet reports the selector of its counted pods in its status.
    let selector =
        object["status"]["hpaPodSelector"].as_str().map_or_else(|| labels.join(","), str::to_owned);
    json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": object["metadata"],
        // Zero is omitted, as by the real server's `omitempty`.
        "spec": match object["spec"]["replicas"].as_u64().unwrap_or(1) {
            0 => json!({}),
            replicas => json!({"replicas": replicas}),
        },
        "status": {"replicas": object["status"]["replicas"].as_u64().unwrap_or(0), "selector": selector},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(verb: &'static str, name: Option<&str>) -> Call {
        Call {
            verb,
            group: "apps".to_owned(),
            resource: "deployments".to_owned(),
            namespace: "n".to_owned(),
            name: name.map(str::to_owned),
        }
    }

    #[test]
    fn a_merge_patch_replaces_members_and_null_removes_them() {
        let mut value = json!({"a": {"b": 1, "c": [1, 2]}, "d": 1});
        merge(&mut value, &json!({"a": {"b": null, "c": [3]}, "e": {"f": 1}}));
        assert_eq!(value, json!({"a": {"c": [3]}, "d": 1, "e": {"f": 1}}));
    }

    #[test]
    fn a_stale_version_is_refused_and_scale_changes_replicas_alone() {
        let mut store = Store::default();
        let object = json!({"metadata": {"name": "d"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}}});
        let mut go = |verb, name, subresource, body: &Value| {
            carry_out(&mut store, &call(verb, name), "deployments", subresource, body.to_string().as_bytes())
        };
        let made = go("create", None, None, &object).expect("it is new");
        assert_eq!(go("create", None, None, &object).expect_err("it is there").code, StatusCode::CONFLICT);
        let scale = go("get", Some("d"), Some("scale"), &json!({})).expect("it is there");
        assert_eq!((&scale["spec"]["replicas"], &scale["status"]["selector"]), (&json!(1), &json!("a=b")));
        let version = &made["metadata"]["resourceVersion"];
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"replicas": 3}});
        let scale = go("patch", Some("d"), Some("scale"), &patch).expect("the version is right");
        assert_eq!(scale["spec"]["replicas"], 3);
        let stale = go("patch", Some("d"), Some("scale"), &patch).expect_err("the version is old");
        assert_eq!((stale.code, stale.reason), (StatusCode::CONFLICT, "Conflict"));
        assert_eq!(go("get", Some("x"), None, &json!({})).expect_err("unknown").code, StatusCode::NOT_FOUND);
        go("delete", Some("d"), None, &json!({})).expect("it is there");
        assert!(go("get", Some("d"), None, &json!({})).is_err());
    }
}
