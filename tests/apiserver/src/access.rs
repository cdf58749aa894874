//! Role-based access control of calls, and a record of all calls.

use std::collections::BTreeSet;

/// A rule of a Role: `rbac.authorization.k8s.io/v1`, "PolicyRule". `*` stands for everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    /// API groups; the core group is empty.
    pub groups: Vec<String>,
    /// Resources, with their subresource, like `deployments/scale`.
    pub resources: Vec<String>,
    /// Names of objects; empty: all objects.
    pub names: Vec<String>,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verbs: Vec<String>,
}

/// A call of the API.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) verb: &'static str,
    pub(crate) group: String,
    /// Resource with its subresource.
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Access {
    /// Rules for all calls; `None` allows everything.
    pub(crate) rules: Option<Vec<Rule>>,
    pub(crate) seen: BTreeSet<String>,
}

impl Access {
    /// Records a call; returns whether it is allowed.
    pub(crate) fn admits(&mut self, call: &Call) -> bool {
        let group = if call.group.is_empty() { "core" } else { &call.group };
        self.seen.insert(format!("{} {group} {}", call.verb, call.resource));
        self.rules.as_ref().is_none_or(|rules| rules.iter().any(|rule| rule.admits(call)))
    }
}

impl Rule {
    fn admits(&self, call: &Call) -> bool {
        let has = |list: &[String], wanted: &str| list.iter().any(|known| known == "*" || known == wanted);
        has(&self.groups, &call.group)
            && has(&self.resources, &call.resource)
            && has(&self.verbs, call.verb)
            // Calls that create or list objects have no name that a rule could restrict.
            && (self.names.is_empty() || call.name.as_deref().is_some_and(|name| has(&self.names, name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_groups_resources_verbs_and_objects() {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        let rule = Rule {
            groups: list(&["apps"]),
            resources: list(&["deployments/scale"]),
            names: list(&["decode"]),
            verbs: list(&["get", "patch"]),
        };
        let call = |verb, group: &str, resource: &str, name: Option<&str>| Call {
            verb,
            group: group.to_owned(),
            resource: resource.to_owned(),
            namespace: "n".to_owned(),
            name: name.map(str::to_owned),
        };
        let mut access = Access { rules: Some(vec![rule]), ..Access::default() };
        assert!(access.admits(&call("patch", "apps", "deployments/scale", Some("decode"))));
        assert!(!access.admits(&call("patch", "apps", "deployments", Some("decode"))));
        assert!(!access.admits(&call("patch", "apps", "deployments/scale", Some("prefill"))));
        assert!(!access.admits(&call("delete", "apps", "deployments/scale", Some("decode"))));
        assert!(!access.admits(&call("list", "", "pods", None)));
        assert_eq!(access.seen.len(), 4, "{:?}", access.seen);
    }
}
