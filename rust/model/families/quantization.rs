//! What a config says of quantised weights: formats that are read, and others by their names.
//!
//! The config decides nothing else: which tensors are FP8 is said by their dtypes and scales, for lists of names in
//! configs are patterns that hide more than they mean.

use std::path::Path;

use serde_json::{Value, json};

use super::Result;
use crate::error::ConfigError;
use crate::model::config_file::Section;

const KEY: &str = "quantization_config";

/// Refuses a config whose weights are in a format that is not read.
///
/// # Errors
/// [`ConfigError::Quantization`] naming the format, [`ConfigError::Value`] for an FP8 scheme of another shape.
pub(super) fn check(file: &Path, root: &Section<'_>) -> Result<()> {
    let Some(section) = root.optional_section(KEY)? else {
        return Ok(());
    };
    let text = |key: &str| section.get(key).and_then(Value::as_str);
    let refused = |got: String| {
        Err(ConfigError::Quantization {
            file: file.to_owned(),
            got,
        })
    };
    match text("quant_method") {
        Some("fp8") => {
            section.only("fmt", &[json!("e4m3")])?;
            section.only("weight_block_size", &[json!([128, 128])])
        }
        Some("compressed-tensors") => match text("format") {
            Some("float-quantized" | "naive-quantized") => match section.get("kv_cache_scheme") {
                None => Ok(()),
                Some(_) => Err(section.invalid(
                    "kv_cache_scheme",
                    "null or left out: keys and values are held as they are computed, in fp32",
                )),
            },
            Some(format) => refused(format!("compressed-tensors {format}")),
            None => Err(section.missing("format", "the layout of compressed tensors")),
        },
        Some(method) => refused(match text("quant_algo") {
            Some(algorithm) => format!("{method} {algorithm}"),
            None => method.to_owned(),
        }),
        None => Err(section.missing("quant_method", "the name of a quantisation")),
    }
}
