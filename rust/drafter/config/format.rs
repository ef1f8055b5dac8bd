//! Which drafter a checkpoint holds, and who packed it: by names and keys, then by tensors, which must agree.

use std::path::Path;

use crate::error::{DrafterError, Error};
use crate::model::config_file::Section;
use crate::weights::Checkpoint;

/// Architecture names that are served.
const ARCHITECTURES: [&str; 7] = [
    "DFlashDraftModel",
    "MuseGlimmerAssistantModel",
    "DFlash2DraftModel",
    "DSparkDraftModel",
    "Qwen3DSparkModel",
    "Gemma4DSparkModel",
    "LlamaForCausalLMEagle3",
];
/// Values of `speculators_model_type` that are served.
const SPECULATORS_TYPES: [(&str, MethodKind); 4] = [
    ("dflash", MethodKind::DFlash),
    ("dflash2", MethodKind::DFlash2),
    ("dspark", MethodKind::DSpark),
    ("eagle3", MethodKind::Eagle3),
];

/// Names of all supported architectures.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.into_iter()
}

/// What a checkpoint holds and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) kind: MethodKind,
    pub(super) packaging: Packaging,
    pub(super) layers: LayerKeys,
}

/// Whose decoder's keys describe a drafter's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKeys {
    /// Qwen3's: of nearly all drafters, whatever their target is.
    Qwen3,
    /// Gemma 4's, copied from the target's config.
    Gemma4,
}

/// The methods a checkpoint may hold, before sizes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MethodKind {
    DFlash,
    DFlash2,
    DSpark,
    Eagle3,
}

/// Whose conventions a checkpoint follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packaging {
    /// z-lab: method keys in `dflash_config`, embedding and head left to the target.
    ZLab,
    /// SpecForge: as z-lab, with `projector_type`.
    SpecForge,
    /// DeepSpec: the target's config with method keys beside its own; frozen copies of embedding and head.
    DeepSpec,
    /// speculators: the decoder's config nested, layers counted from the embedding, copies of embedding and head.
    Speculators,
    /// Muse Glimmer's assistant: DFlash with flat keys, and names of its own for what reads the taps.
    MuseAssistant,
    /// EAGLE's own names, which SpecForge keeps.
    Eagle,
}

impl Packaging {
    /// Its name, for a reader.
    pub fn name(self) -> &'static str {
        match self {
            Self::ZLab => "z-lab",
            Self::SpecForge => "SpecForge",
            Self::DeepSpec => "DeepSpec",
            Self::Speculators => "speculators",
            Self::MuseAssistant => "Muse assistant",
            Self::Eagle => "EAGLE",
        }
    }
}

impl MethodKind {
    fn title(self) -> &'static str {
        match self {
            Self::DFlash => "DFlash",
            Self::DFlash2 => "DFlash2",
            Self::DSpark => "DSpark",
            Self::Eagle3 => "EAGLE-3",
        }
    }
}

/// Whether a tensor of this name belongs to a method.
type IsEvidence = fn(&str) -> bool;

/// What tensor names say of a method; the first that matches decides.
const EVIDENCE: [(MethodKind, IsEvidence); 3] = [
    (MethodKind::DSpark, |name| {
        name.starts_with("markov_head.") || name.starts_with("confidence_head.")
    }),
    (MethodKind::Eagle3, |name| {
        name.starts_with("midlayer.") || name == "layers.0.hidden_norm.weight"
    }),
    (MethodKind::DFlash2, |name| {
        name.starts_with("candidate_selector.")
            || name.contains(".attention_conv.")
            || name.contains(".mlp_conv.")
    }),
];

/// The format by name, cross-checked with the tensors.
pub(super) fn detect(
    dir: &Path,
    root: &Section<'_>,
    checkpoint: &Checkpoint,
) -> Result<Format, Error> {
    let format = by_name(dir, root)?;
    let by_tensors = EVIDENCE.iter().find_map(|(kind, matches)| {
        let evidence = checkpoint.names().find(|name| matches(name))?;
        Some((*kind, evidence))
    });
    let file = |tensor: &str| match checkpoint.file(tensor) {
        Some(file) => file.to_owned(),
        None => dir.to_owned(),
    };
    match (by_tensors, format.kind) {
        (Some((tensors, evidence)), named) if tensors != named => {
            Err(DrafterError::NameAgainstTensors {
                file: file(evidence),
                config: named.title(),
                tensors: tensors.title(),
                evidence: evidence.to_owned(),
            })?
        }
        (None, MethodKind::DFlash2) => Err(DrafterError::NameAgainstTensors {
            file: file("fc.weight"),
            config: MethodKind::DFlash2.title(),
            tensors: MethodKind::DFlash.title(),
            evidence: "no candidate_selector.* or *_conv.*".to_owned(),
        })?,
        _ => Ok(format),
    }
}

/// The format that the config's names tell of.
pub(super) fn by_name(dir: &Path, root: &Section<'_>) -> Result<Format, Error> {
    let unsupported = |got: String| {
        Error::from(DrafterError::Unsupported {
            file: dir.join("config.json"),
            expected: format!(
                "{}, or speculators_model_type {}",
                ARCHITECTURES.join(", "),
                SPECULATORS_TYPES.map(|(name, _)| name).join(", ")
            ),
            got,
        })
    };
    // Another format whatever the architecture says: it nests the decoder's config and counts layers from one.
    if let Some(kind) = root.optional_text("speculators_model_type")? {
        let Some((_, kind)) = SPECULATORS_TYPES.iter().find(|(name, _)| *name == kind) else {
            return Err(unsupported(format!("speculators {kind}")));
        };
        return Ok(Format {
            kind: *kind,
            packaging: Packaging::Speculators,
            layers: LayerKeys::Qwen3,
        });
    }
    // DSpark bundled with its target shares the target's files and layers.
    if root.get("dspark_block_size").is_some() {
        return Err(unsupported(
            "a DSpark bundled with its target (dspark_block_size)".to_owned(),
        ));
    }
    let names = root
        .optional_array("architectures")?
        .ok_or_else(|| root.missing("architectures", "an array with the drafter's class name"))?;
    let nested = root.optional_section("dflash_config")?;
    let projector = match &nested {
        Some(nested) => nested.optional_text("projector_type")?,
        None => None,
    };
    let name = names.first().and_then(|name| name.as_str());
    let layers = match name {
        Some("Gemma4DSparkModel") => LayerKeys::Gemma4,
        _ => LayerKeys::Qwen3,
    };
    let (kind, packaging) = match name {
        Some("DFlashDraftModel") if projector == Some("dspark") => {
            (MethodKind::DSpark, Packaging::SpecForge)
        }
        Some("DFlashDraftModel") => (MethodKind::DFlash, Packaging::ZLab),
        Some("MuseGlimmerAssistantModel") => (MethodKind::DFlash, Packaging::MuseAssistant),
        Some("DFlash2DraftModel") => (MethodKind::DFlash2, Packaging::ZLab),
        // Serving engines know only one of the first two names, so files are renamed: the nesting tells who packed them.
        Some("DSparkDraftModel" | "Qwen3DSparkModel" | "Gemma4DSparkModel") => match nested {
            Some(_) => (MethodKind::DSpark, Packaging::SpecForge),
            None => (MethodKind::DSpark, Packaging::DeepSpec),
        },
        Some("LlamaForCausalLMEagle3") => (MethodKind::Eagle3, Packaging::Eagle),
        Some(name) => return Err(unsupported(name.to_owned())),
        None => {
            let names = ARCHITECTURES.join(", ");
            let expected = format!("an array with the drafter's class name, one of {names}");
            Err(root.invalid("architectures", expected))?
        }
    };
    Ok(Format {
        kind,
        packaging,
        layers,
    })
}

#[cfg(test)]
pub(in crate::drafter) mod tests;
