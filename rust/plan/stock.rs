//! What `kernels="stock"` goes with: one GPU, BF16, a dense head, one chain of drafts.
//!
//! In: options as given, and the model. Out: options that say so, or the first that asks for something else.

use crate::device::Backend;
use crate::error::OptionError;
use crate::model::config::{LayerConfig, ModelConfig, OutputGate, QkNorm, ValueSource};
use crate::options::EngineOptions;
use crate::options::speculation::TreePolicy;

/// `options` with what stock kernels imply.
///
/// # Errors
/// [`OptionError::Value`] for an option that they cannot honour.
pub(super) fn resolve(
    options: &EngineOptions,
    config: &ModelConfig,
    backend: Backend,
) -> Result<EngineOptions, OptionError> {
    let refuse = |option, expected: &str, got: String| {
        Err(OptionError::Value {
            option,
            expected: format!("{expected} with kernels \"stock\""),
            got,
        })
    };
    if backend == Backend::Host {
        let got = format!("\"{}\", which is the CPU here", options.device);
        return refuse("device", "a GPU", got);
    }
    if !is_plain(config) {
        return Err(OptionError::Value {
            option: "kernels",
            expected: format!("\"lossless\" for {}", config.architecture),
            got: "\"stock\", which knows neither norms behind sublayers nor values and gates of other kinds"
                .to_owned(),
        });
    }
    let chain = TreePolicy::Chain.name();
    let tree = options.tree.as_deref().unwrap_or(chain);
    for (option, allowed, got) in [
        (
            "weight_format",
            &["auto", "bf16"][..],
            &*options.weight_format,
        ),
        ("head", &["auto", "dense"], &options.head),
        ("tree", &[chain], tree),
    ] {
        if !allowed.contains(&got) {
            return refuse(option, &allowed.join(" or "), format!("\"{got}\""));
        }
    }
    if options.q_passes > 0 {
        return refuse("q_passes", "0", options.q_passes.to_string());
    }
    Ok(EngineOptions {
        weight_format: "bf16".to_owned(),
        head: "dense".to_owned(),
        tree: Some(chain.to_owned()),
        ..options.clone()
    })
}

/// Whether the layers have nothing that only the lossless kernels run.
fn is_plain(config: &ModelConfig) -> bool {
    let is_plain = |layer: &LayerConfig| match layer {
        LayerConfig::Attention(attention) => {
            attention.values == ValueSource::Projection
                && attention.output_gate != OutputGate::OwnProjection
                && attention.qk_norm != QkNorm::Weightless
        }
        LayerConfig::GatedDelta => true,
    };
    config.post_norms.is_none() && config.layers.iter().all(is_plain)
}
