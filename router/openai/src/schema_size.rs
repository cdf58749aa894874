//! Size of a JSON schema in the compiler of grammars.
//!
//! `llguidance` merges the schemas in `allOf`, and those beside a `$ref`, `anyOf`, `oneOf` or `enum`, by copying: two
//! alternatives beside two others are four, and a definition that merges two copies of the next one doubles with each, so that
//! 4 KiB of schema could take all memory. [`check_size`] computes a bound first: for merged parts, the product of their sizes.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Largest number of values of a schema after merging; each takes about 1 KiB while the compiler works.
const MERGED_VALUES_MAX: usize = 20_000;
/// Largest nesting of schemas and merged references together.
const MERGE_DEPTH_MAX: usize = 128;
/// Number of JSON types: a schema without `type` has an alternative for each.
const TYPES: usize = 7;

/// Refuses a schema that would become too large. [`check_schema`](crate::json_schema::check_schema) has checked it in all
/// other respects.
pub(super) fn check_size(root: &Value) -> Result<(), String> {
    let mut merges = Merges { root, targets: HashMap::new() };
    let values = merges.size(root, References::Kept, 0)?.saturating_add(merges.definitions(root)?);
    match values <= MERGED_VALUES_MAX {
        true => Ok(()),
        false => Err(format!(
            "it has more than {MERGED_VALUES_MAX} values when `allOf`, `anyOf`, `oneOf`, `enum` and `$ref` are merged with what \
                 stands beside them"
        )),
    }
}

/// References that are replaced by their targets while a schema is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum References {
    /// None; each stays a reference.
    Kept,
    /// References of the schema itself and of its alternatives.
    Merged,
    /// References in nested schemas, too.
    AllMerged,
}

/// A bound of the values that a schema has after merging.
struct Merges<'a> {
    root: &'a Value,
    /// Sizes by reference; `None` while a size is being computed.
    targets: HashMap<(&'a str, References), Option<usize>>,
}

impl<'a> Merges<'a> {
    /// Sum of the sizes of all definitions that a reference can point to.
    fn definitions(&mut self, schema: &'a Value) -> Result<usize, String> {
        let mut sum = 0_usize;
        for keyword in ["$defs", "definitions"] {
            for definition in schema.get(keyword).and_then(Value::as_object).into_iter().flat_map(Map::values)
            {
                let values = self.size(definition, References::Kept, 0)?;
                sum = sum.saturating_add(values).saturating_add(self.definitions(definition)?);
            }
        }
        Ok(sum)
    }

    fn size(&mut self, schema: &'a Value, references: References, depth: usize) -> Result<usize, String> {
        if depth > MERGE_DEPTH_MAX {
            return Err(format!("what it merges is nested more than {MERGE_DEPTH_MAX} deep"));
        }
        let Value::Object(keywords) = schema else { return Ok(1) };
        let parts = Parts::of(keywords);
        let is_merge = parts.count() > 1;
        let inside = match is_merge {
            false => references,
            // If two parts have nested schemas, these are merged with each other.
            true if parts.nested() > 1 => References::AllMerged,
            true => references.max_with_merged(),
        };
        let mut product = self.own(keywords, inside, depth)?;
        for alternatives in &parts.alternatives {
            product = product.saturating_mul(self.sum(alternatives.iter(), inside, depth + 1)?.max(1));
        }
        for entry in parts.all_of {
            product = product.saturating_mul(self.size(entry, inside, depth + 1)?);
        }
        product = product.saturating_mul(parts.values.max(1));
        if let Some(reference) = parts.reference
            && inside != References::Kept
        {
            product = product.saturating_mul(self.target(reference, inside, depth + 1)?);
        }
        Ok(product)
    }

    fn sum(
        &mut self,
        schemas: impl Iterator<Item = &'a Value>,
        references: References,
        depth: usize,
    ) -> Result<usize, String> {
        let mut sum = 0_usize;
        for schema in schemas {
            sum = sum.saturating_add(self.size(schema, references, depth)?);
        }
        Ok(sum)
    }

    /// Size of the keywords that are not merged.
    fn own(
        &mut self,
        keywords: &'a Map<String, Value>,
        references: References,
        depth: usize,
    ) -> Result<usize, String> {
        let nested = if references == References::AllMerged { references } else { References::Kept };
        let (mut own, mut patterns, mut has_own, mut types) = (Vec::new(), 0_usize, false, TYPES);
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("properties", Value::Object(named)) => {
                    own.push(self.sum(named.values(), nested, depth + 1)?)
                }
                // A property whose name matches a pattern is merged with the pattern's schema.
                ("patternProperties", Value::Object(named)) => {
                    patterns = self.sum(named.values(), nested, depth + 1)?;
                }
                ("prefixItems" | "items", Value::Array(schemas)) => {
                    own.push(self.sum(schemas.iter(), nested, depth + 1)?);
                }
                ("additionalProperties" | "items" | "additionalItems", schema) => {
                    own.push(self.size(schema, nested, depth + 1)?);
                }
                ("type", Value::Array(names)) => types = names.len(),
                ("type", _) => types = 1,
                (keyword, _) if MERGED.contains(&keyword) || DESCRIBING.contains(&keyword) => continue,
                _ => {}
            }
            has_own = true;
        }
        let own = own.into_iter().fold(1, usize::saturating_add);
        let own = own.saturating_mul(patterns.saturating_add(1));
        // One alternative per type.
        Ok(own.saturating_add(if has_own { types - types.min(1) } else { 0 }))
    }

    fn target(&mut self, reference: &'a str, references: References, depth: usize) -> Result<usize, String> {
        match self.targets.get(&(reference, references)) {
            Some(Some(values)) => return Ok(*values),
            Some(None) => {
                return Err(format!("`$ref` to `{reference}` is merged with what it is part of"));
            }
            None => {}
        }
        // A missing definition is reported by the compiler.
        let mut steps = reference.split('/').skip(1);
        let Some(target) = steps.try_fold(self.root, |schema, step| schema.get(step)) else { return Ok(1) };
        self.targets.insert((reference, references), None);
        let values = self.size(target, references, depth)?;
        self.targets.insert((reference, references), Some(values));
        Ok(values)
    }
}

impl References {
    fn max_with_merged(self) -> Self {
        if self == Self::AllMerged { self } else { Self::Merged }
    }
}

/// Keywords that are merged with their neighbours.
const MERGED: [&str; 6] = ["allOf", "anyOf", "oneOf", "enum", "const", "$ref"];
/// Keywords that constrain nothing.
const DESCRIBING: [&str; 14] = [
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "x-guidance",
];

/// Parts of a schema that are merged with each other.
struct Parts<'a> {
    /// Whether there are keywords outside [`MERGED`].
    has_own: bool,
    has_nested: bool,
    alternatives: Vec<&'a [Value]>,
    all_of: &'a [Value],
    /// Values in `enum` and `const`, which are schemas to the compiler.
    values: usize,
    reference: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(keywords: &'a Map<String, Value>) -> Self {
        let array = |keyword: &str| keywords.get(keyword).and_then(Value::as_array).map(Vec::as_slice);
        let is_own = |keyword: &&String| {
            !MERGED.contains(&keyword.as_str()) && !DESCRIBING.contains(&keyword.as_str())
        };
        Self {
            has_own: keywords.keys().any(|keyword| is_own(&keyword)),
            has_nested: keywords.keys().filter(is_own).any(|keyword| NESTING.contains(&keyword.as_str())),
            alternatives: ["anyOf", "oneOf"].into_iter().filter_map(array).collect(),
            all_of: array("allOf").unwrap_or_default(),
            values: array("enum").into_iter().flatten().chain(keywords.get("const")).map(count_of).sum(),
            reference: keywords.get("$ref").and_then(Value::as_str),
        }
    }

    fn count(&self) -> usize {
        usize::from(self.has_own)
            + self.alternatives.len()
            + self.all_of.len()
            + usize::from(self.values > 0)
            + usize::from(self.reference.is_some())
    }

    /// Number of parts that may have nested schemas.
    fn nested(&self) -> usize {
        let is_flat = |schema: &&Value| match schema {
            Value::Object(keywords) => {
                let parts = Parts::of(keywords);
                !parts.has_nested
                    && parts.alternatives.is_empty()
                    && parts.all_of.is_empty()
                    && parts.reference.is_none()
            }
            _ => true,
        };
        usize::from(self.has_nested)
            + self.alternatives.iter().filter(|entries| !entries.iter().all(|entry| is_flat(&entry))).count()
            + self.all_of.iter().filter(|entry| !is_flat(entry)).count()
            + usize::from(self.values > 0)
            + usize::from(self.reference.is_some())
    }
}

fn count_of(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count_of).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(count_of).sum::<usize>(),
        _ => 1,
    }
}

/// Keywords that contain nested schemas.
const NESTING: [&str; 6] =
    ["properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::json_schema::check_schema;

    /// A chain of definitions, each with two properties that merge the next one.
    fn doubling(levels: usize) -> Value {
        let next =
            |level: usize| json!({"allOf": [{"$ref": format!("#/$defs/a{level}")}, {"type": "object"}]});
        let definitions = (0..levels).map(|level| {
            (
                format!("a{level}"),
                json!({"type": "object", "properties": {"p": next(level + 1), "q": next(level + 1)}}),
            )
        });
        let last = (format!("a{levels}"), json!({"type": "object"}));
        json!({"$ref": "#/$defs/a0", "$defs": definitions.chain([last]).collect::<Map<_, _>>()})
    }

    #[test]
    fn schemas_that_grow_when_they_are_merged_are_refused() {
        let objects = |count: usize| json!({"anyOf": vec![json!({"type": "object"}); count]});
        let large: Map<String, Value> =
            (0..400).map(|at| (format!("p{at}"), json!({"type": "string"}))).collect();
        let large = json!({"type": "object", "properties": {"p": {"type": "object", "properties": large}}});
        let twice = json!({"$ref": "#/$defs/a", "type": "object"});
        for schema in [
            doubling(24),
            doubling(100),
            json!({"allOf": [objects(60), objects(60), large]}),
            json!({"allOf": [objects(500), large]}),
            json!({"type": "object", "properties": large["properties"]["p"]["properties"],
                "patternProperties": {"^p": large}}),
            json!({"anyOf": [{"allOf": [{"$ref": "#"}, {"type": "object"}]}]}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": twice}, "allOf": [twice]}}}),
            json!({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"x": {"type": "object"}}}],
                "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}}}}),
        ] {
            let refused = check_schema(&schema).expect_err("too large");
            assert!(refused.contains("merge"), "{refused}: {schema}");
        }
        for schema in [
            doubling(6),
            // Schemas as Pydantic, Zod and people write them.
            json!({"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/$defs/n"}], "description": "d"},
                "b": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "default": null}},
                "$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}}),
            json!({"type": "string", "enum": vec!["x"; 500]}),
            json!({"type": "object", "properties": large["properties"]["p"]["properties"], "additionalProperties": false,
                "anyOf": [{"required": ["p1"]}, {"required": ["p2"]}]}),
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}}], "$defs": {"n": {"type": "integer"}}}),
        ] {
            assert_eq!(check_schema(&schema), Ok(()), "{schema}");
        }
    }
}
