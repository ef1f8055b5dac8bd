//! A JSON config file read key by key, with errors that name file, dotted key, expected and got.
//!
//! In: a path. Out: [`Section`]s (the root object or one nested in it) whose readers return checked values. `null` is
//! the same as an absent key, as published files use both. Unknown keys are nobody's business and ignored.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::ConfigError;

type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// Most elements of a tensor or a recurrent state, a hundred times those of any model. With at most ten thousand layers
/// of them, no size in bytes of weights, of a page or of a slot reaches 2^64, so plans need not check each product.
const MAX_ELEMENTS: u64 = 1 << 36;

/// A list of more items, or an object of more keys, is shown by the first [`NUM_SHOWN`] of them and their number.
const MAX_WHOLE: usize = 8;
const NUM_SHOWN: usize = 4;
/// Most characters of a string that are shown.
const MAX_TEXT: usize = 200;

/// A value for an error message: as JSON, but no longer than people read.
pub(crate) fn shown(value: &Value) -> String {
    let list = |items: &mut dyn Iterator<Item = String>, num_items: usize, what: &str| {
        let num_shown = match num_items {
            0..=MAX_WHOLE => num_items,
            _ => NUM_SHOWN,
        };
        let mut text = items.take(num_shown).collect::<Vec<_>>().join(",");
        if num_shown < num_items {
            text += &format!(",... {num_items} {what}");
        }
        text
    };
    match value {
        Value::Array(items) => {
            let text = list(&mut items.iter().map(shown), items.len(), "items");
            format!("[{text}]")
        }
        Value::Object(map) => {
            let mut entries = map.iter().map(|(key, value)| {
                let key = shown(&Value::String(key.clone()));
                format!("{key}:{}", shown(value))
            });
            let text = list(&mut entries, map.len(), "keys");
            format!("{{{text}}}")
        }
        Value::String(text) => match text.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => format!("{}...", Value::String(text[..end].to_owned())),
            None => value.to_string(),
        },
        _ => value.to_string(),
    }
}

/// A parsed config file.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    root: Map<String, Value>,
}

impl ConfigFile {
    /// Reads and parses `path`.
    ///
    /// # Errors
    /// [`ConfigError::Io`], [`ConfigError::Json`], or [`ConfigError::Value`] when the file is no object.
    pub fn read(path: &Path) -> Result<Self> {
        let io_error = |source| ConfigError::Io {
            file: path.to_owned(),
            source,
        };
        // Opening a pipe would wait for a writer that never comes.
        if path.exists() && !path.is_file() {
            return Err(io_error(std::io::Error::other("expected a regular file")));
        }
        let text = std::fs::read(path).map_err(io_error)?;
        Self::parse(path, &text)
    }

    /// Parses the text of `path`.
    ///
    /// # Errors
    /// [`ConfigError::Json`], or [`ConfigError::Value`] when it is no object.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(root)) => Ok(Self {
                path: path.to_owned(),
                root,
            }),
            Ok(other) => Err(ConfigError::Value {
                file: path.to_owned(),
                key: "(root)".to_owned(),
                expected: "an object".to_owned(),
                got: shown(&other),
            }),
            Err(source) => Err(ConfigError::Json {
                file: path.to_owned(),
                source,
            }),
        }
    }

    /// The object at `key` of the outermost one, as a file of its own.
    ///
    /// # Errors
    /// [`ConfigError`] when it is absent or no object.
    pub fn part(&self, key: &str) -> Result<Self> {
        Ok(Self {
            path: self.path.clone(),
            root: self.root().section(key)?.map.clone(),
        })
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that `tensor` of `shape` is of a size that can be.
    ///
    /// # Errors
    /// [`ConfigError::Oversized`].
    pub fn check_shape(&self, tensor: &str, shape: &[usize]) -> Result<()> {
        let num_elements = shape
            .iter()
            .try_fold(1_u64, |product, &size| product.checked_mul(size as u64));
        match num_elements {
            Some(num_elements) if num_elements <= MAX_ELEMENTS => Ok(()),
            _ => Err(ConfigError::Oversized {
                file: self.path.clone(),
                tensor: tensor.to_owned(),
                expected: MAX_ELEMENTS,
                got: shape.to_vec(),
            }),
        }
    }

    /// The outermost object.
    pub fn root(&self) -> Section<'_> {
        Section {
            file: &self.path,
            path: String::new(),
            map: &self.root,
        }
    }
}

/// An object of a config file.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    file: &'a Path,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Section<'a> {
    /// The value of `key`; `None` when absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// The keys that are there.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        let map = self.map.iter();
        map.filter(|(_, value)| !value.is_null())
            .map(|(key, _)| &key[..])
    }

    /// An error saying that `key` is absent.
    pub fn missing(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::MissingKey {
            file: self.file.to_owned(),
            key: self.dotted(key),
            expected: expected.into(),
        }
    }

    /// An error saying that `key` should be `expected`.
    pub fn invalid(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            file: self.file.to_owned(),
            key: self.dotted(key),
            expected: expected.into(),
            got: shown(self.map.get(key).unwrap_or(&Value::Null)),
        }
    }

    /// The object at `key`, if there.
    ///
    /// # Errors
    /// [`ConfigError::Value`] when it is no object.
    pub fn optional_section(&self, key: &str) -> Result<Option<Section<'a>>> {
        self.read(key, "an object", |value| {
            Some(Section {
                file: self.file,
                path: self.dotted(key),
                map: value.as_object()?,
            })
        })
    }

    /// The object at `key`.
    ///
    /// # Errors
    /// [`ConfigError`] when it is absent or no object.
    pub fn section(&self, key: &str) -> Result<Section<'a>> {
        self.optional_section(key)?
            .ok_or_else(|| self.missing(key, "an object"))
    }

    /// The size at `key`, if there: an integer from 1 to `i32::MAX`, so that products of two sizes cannot overflow.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a positive 31-bit integer", |value| {
            let size = i32::try_from(value.as_i64()?).ok()?;
            usize::try_from(size).ok().filter(|&size| size > 0)
        })
    }

    /// The size at `key`.
    ///
    /// # Errors
    /// [`ConfigError`] when it is absent or no size.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?
            .ok_or_else(|| self.missing(key, "a positive integer"))
    }

    /// The positive number at `key`, if there: one that is neither 0 nor infinite as an fp32, which it ends as.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a positive number within fp32's range", |value| {
            let number = value.as_f64()?;
            let stored = number as f32;
            (stored > 0.0 && stored.is_finite()).then_some(number)
        })
    }

    /// The positive number at `key`.
    ///
    /// # Errors
    /// [`ConfigError`] when it is absent or no positive number.
    pub fn positive(&self, key: &str) -> Result<f64> {
        self.optional_positive(key)?
            .ok_or_else(|| self.missing(key, "a positive number"))
    }

    /// The boolean at `key`, if there.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn optional_flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// The string at `key`, if there.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn optional_text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", Value::as_str)
    }

    /// The array at `key`, if there.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn optional_array(&self, key: &str) -> Result<Option<&'a [Value]>> {
        self.read(key, "an array", |value| value.as_array().map(|a| &a[..]))
    }

    /// The token ids at `key`: one id, an array of them, or none when absent. Each lies below `vocab_size`.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for anything else.
    pub fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
        let id = |value: &Value| {
            let id = u32::try_from(value.as_u64()?).ok()?;
            ((id as usize) < vocab_size).then_some(id)
        };
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.invalid(key, format!("token ids below {vocab_size}")))
    }

    /// Refuses any other value than `expected` at `key`; an absent key is fine.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn only(&self, key: &str, expected: &[Value]) -> Result<()> {
        match self.get(key) {
            Some(value) if !expected.contains(value) => {
                let list: Vec<String> = expected.iter().map(Value::to_string).collect();
                Err(self.invalid(key, list.join(" or ")))
            }
            _ => Ok(()),
        }
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.get(key)
            .map(|value| convert(value).ok_or_else(|| self.invalid(key, expected)))
            .transpose()
    }

    fn dotted(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_shown_as_json_but_long_ones_by_their_start() {
        let eight: Vec<u32> = (0..8).collect();
        for short in [json!(null), json!(-1.5), json!("\"\u{e9}"), json!(eight)] {
            assert_eq!(shown(&short), short.to_string());
        }
        let nested = json!({"b": [[], {}], "a": {"b": [1, "x"]}});
        assert_eq!(shown(&nested), nested.to_string());
        let nine: Vec<u32> = (0..9).collect();
        assert_eq!(shown(&json!(nine)), "[0,1,2,3,... 9 items]");
        let keys: Map<String, Value> = (10..30).map(|i| (i.to_string(), json!(nine))).collect();
        let entry = |key: u32| format!("\"{key}\":[0,1,2,3,... 9 items]");
        let first = [10, 11, 12, 13].map(entry).join(",");
        assert_eq!(shown(&json!([keys])), format!("[{{{first},... 20 keys}}]"));
        let text = "\u{e9}".repeat(201);
        assert_eq!(shown(&json!(text)), format!("\"{}\"...", &text[..400]));
        assert_eq!(shown(&json!(text[..400])), format!("\"{}\"", &text[..400]));
    }
}
