//! Rotary embeddings as configs state them, and the ways of changing their frequencies that are known by name.
//!
//! In: a config's section. Out: a [`RopeConfig`], or an error that lists the types which are known. Targets and drafters
//! are read alike but for these: YaRN is what some drafters were trained with, and no target that is served.

use serde_json::json;

use super::Result;
use crate::model::config::{RopeConfig, RopeScaling};
use crate::model::config_file::Section;

/// A change of frequencies that files call by its name.
pub(crate) struct RopeType {
    name: &'static str,
    read: fn(&Section<'_>) -> Result<RopeScaling>,
}

const DEFAULT: RopeType = RopeType {
    name: "default",
    read: |_| Ok(RopeScaling::None),
};
const LLAMA3: RopeType = RopeType {
    name: "llama3",
    read: llama3,
};
const YARN: RopeType = RopeType {
    name: "yarn",
    read: yarn,
};

/// What targets may have.
pub(super) const OF_TARGETS: [RopeType; 2] = [DEFAULT, LLAMA3];
/// What drafters may have.
pub(crate) const OF_DRAFTERS: [RopeType; 3] = [DEFAULT, LLAMA3, YARN];

/// Where a config states its rotation: the level that holds the base, and the object that says how frequencies change.
///
/// An older file's `rope_scaling`, where it says anything, stands in the place of `rope_parameters`: transformers reads a
/// file that holds both so. A base lies in the object or beside it.
pub(crate) fn rope_sections<'a>(text: &Section<'a>) -> Result<(Section<'a>, Option<Section<'a>>)> {
    let older = text.optional_section("rope_scaling")?;
    let parameters = match older.filter(|section| section.keys().next().is_some()) {
        Some(section) => Some(section),
        None => text.optional_section("rope_parameters")?,
    };
    let base = match &parameters {
        Some(section) if section.get("rope_theta").is_some() => section,
        _ => text,
    };
    Ok((base.clone(), parameters))
}

/// The rotary embedding with `rope_theta` of `base`.
pub(crate) fn rope(
    base: &Section<'_>,
    scaling: RopeScaling,
    rotary_dim: usize,
) -> Result<RopeConfig> {
    let theta = base.optional_positive("rope_theta")?.ok_or_else(|| {
        base.missing(
            "rope_theta",
            "the rotary base; 10000 for models older than the key",
        )
    })?;
    Ok(RopeConfig {
        theta,
        rotary_dim,
        num_pairs: rotary_dim / 2,
        scaling,
    })
}

/// The change of frequencies that `section` names, one of `known`; none without a section.
pub(crate) fn rope_scaling(
    section: Option<&Section<'_>>,
    known: &[RopeType],
) -> Result<RopeScaling> {
    let Some(section) = section else {
        return Ok(RopeScaling::None);
    };
    // `type` is how files before transformers 4.43 spell it.
    let key = match section.get("rope_type") {
        Some(_) => "rope_type",
        None => "type",
    };
    let expected = || {
        let names: Vec<String> = known.iter().map(|k| format!("\"{}\"", k.name)).collect();
        names.join(" or ")
    };
    match section.optional_text(key)? {
        Some(name) => match known.iter().find(|known| known.name == name) {
            Some(known) => (known.read)(section),
            None => Err(section.invalid(key, expected())),
        },
        None => Err(section.missing("rope_type", expected())),
    }
}

fn llama3(section: &Section<'_>) -> Result<RopeScaling> {
    let low_freq_factor = section.positive("low_freq_factor")?;
    let high_freq_factor = section.positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(section.invalid(
            "high_freq_factor",
            format!("more than low_freq_factor {low_freq_factor}"),
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: section.positive("factor")? as f32,
        low_freq_factor: low_freq_factor as f32,
        high_freq_factor: high_freq_factor as f32,
        original_max_position_embeddings: section.size("original_max_position_embeddings")?,
    })
}

fn yarn(section: &Section<'_>) -> Result<RopeScaling> {
    for variant in ["mscale", "mscale_all_dim"] {
        if section.get(variant).is_some() {
            return Err(section.invalid(variant, "left out; attention_factor says it"));
        }
    }
    section.only("truncate", &[json!(true)])?;
    let factor = section.positive("factor")?;
    let or = |key: &str, default: f64| {
        let value = section.optional_positive(key)?;
        Ok(value.unwrap_or(default) as f32)
    };
    let attention_factor = 0.1 * factor.max(1.0).ln() + 1.0;
    Ok(RopeScaling::Yarn {
        factor: factor as f32,
        beta_fast: or("beta_fast", 32.0)?,
        beta_slow: or("beta_slow", 1.0)?,
        original_max_position_embeddings: section.size("original_max_position_embeddings")?,
        attention_factor: or("attention_factor", attention_factor)?,
    })
}
