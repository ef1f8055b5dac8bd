//! Engine options as given. What they come to on a model and a machine is `plan.rs`.

pub mod speculation;

use crate::error::OptionError;

/// Most rows of one tree: ancestors fit a 64-bit mask, and a path stays within the recurrent log.
pub(crate) const MAX_TREE_NODES: usize = 64;

/// Most Q passes of a step: their paths share the rows of one exact pass.
const MAX_Q_PASSES: usize = 8;

/// Most rows of a pass: far beyond what one read of the weights serves.
const MAX_BATCHED_TOKENS: usize = 8192;

/// Most worker threads: far beyond any host's memory channels.
const MAX_THREADS: usize = 256;

/// Everything a caller may set. Defaults live in the Python package.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Activation dtype: `auto` or `float32`.
    pub dtype: String,
    /// `auto`, `cpu`, `cuda` or `cuda:N`; see [`DeviceChoice`].
    pub device: String,
    /// How the target's linear layers are held: see [`WeightFormat`].
    pub weight_format: String,
    /// Which kernels the target runs on: `lossless` or `stock`; see [`KernelSet`].
    pub kernels: String,
    /// How greedy tokens are found: `auto`, `dense` or `screened`.
    pub head: String,
    /// Context limit in tokens; `None` = the model's.
    pub max_model_len: Option<usize>,
    /// Requests that may run at once.
    pub max_num_seqs: usize,
    /// Most rows of a pass over all requests, and so of a prompt chunk; `None` = the usual number.
    pub max_num_batched_tokens: Option<usize>,
    /// Share of the available memory that the engine may take.
    pub gpu_memory_utilization: f64,
    /// Seeds the requests that sample and bring no seed.
    pub seed: u64,
    /// Worker threads; `None` = one per core.
    pub num_threads: Option<usize>,
    /// End-of-sequence ids besides the model's own (the tokenizer's).
    pub extra_eos_token_ids: Vec<u32>,
    /// Drafter method asked for; checked against the drafter.
    pub method: Option<String>,
    /// Most drafted tokens on a path of every tree, or of each; none = the drafter's block.
    pub num_speculative_tokens: Vec<usize>,
    /// Tree policy; `None` = the best one the drafter has scores for.
    pub tree: Option<String>,
    /// Rows of every tree, root included, or of each; none = the policy's usual size.
    pub tree_nodes: Vec<usize>,
    /// Passes through the 8-bit view before the exact one.
    pub q_passes: usize,
    /// LM head of those passes: `auto`, `exact` or `int8`.
    pub q_head: String,
    /// Measured cost of a step that verifies 1, 2, ... rows: trees grow only while rows pay. `None` = to full size.
    pub verify_costs: Option<Vec<f64>>,
    /// Estimated chance of acceptance below which a drafter with a confidence head stops; 0 = it does not.
    pub min_confidence: f64,
    /// Shortest and longest suffix that prompt lookup matches; `None` = the usual ones.
    pub prompt_lookup: PromptLookup,
}

/// Suffix lengths of prompt lookup, under vLLM's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptLookup {
    /// `prompt_lookup_min`.
    pub min: Option<usize>,
    /// `prompt_lookup_max`.
    pub max: Option<usize>,
}

/// Where an engine is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if kernels run on it, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this index.
    Cuda(usize),
}

impl DeviceChoice {
    /// The choice of this name: `auto`, `cpu`, `cuda` (the first GPU) or `cuda:N`.
    ///
    /// # Errors
    /// [`OptionError::Value`] for any other name.
    pub fn named(name: &str) -> Result<Self, OptionError> {
        let index = name.strip_prefix("cuda:");
        // `parse` alone would take a sign.
        let index = index.filter(|index| index.bytes().all(|digit| digit.is_ascii_digit()));
        match (name, index.map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err(OptionError::Value {
                option: "device",
                expected: "auto, cpu, cuda or cuda:N".to_owned(),
                got: format!("\"{name}\""),
            }),
        }
    }
}

/// How the matrices of linear layers are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Each as the checkpoint holds it.
    Auto,
    /// BF16, decoded if need be.
    Bf16,
    /// W12, encoded if need be, where it pays.
    W12,
    /// FP8 where the checkpoint holds it, which it must somewhere; activations are multiplied as they are.
    Fp8,
    /// Likewise, with activations rounded to FP8 as well: another model, with its own text.
    Fp8W8A8,
}

impl WeightFormat {
    /// The format of this name.
    ///
    /// # Errors
    /// [`OptionError::Value`] for a name that is none.
    pub fn named(name: &str) -> Result<Self, OptionError> {
        one_of(
            "weight_format",
            name,
            &["auto", "bf16", "w12", "fp8", "fp8_w8a8"],
        )?;
        Ok(match name {
            "bf16" => Self::Bf16,
            "w12" => Self::W12,
            "fp8" => Self::Fp8,
            "fp8_w8a8" => Self::Fp8W8A8,
            _ => Self::Auto,
        })
    }
}

impl WeightFormat {
    /// Its name among the options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::W12 => "w12",
            Self::Fp8 => "fp8",
            Self::Fp8W8A8 => "fp8_w8a8",
        }
    }
}

/// The kernels of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelSet {
    /// Row-invariant ones: speculation changes no token.
    Lossless,
    /// cuBLASLt, a dense head and a recurrence token by token, as stock engines run them. A baseline to measure against,
    /// outside the promise: sums depend on the number of rows.
    Stock,
}

impl KernelSet {
    /// The set of this name.
    ///
    /// # Errors
    /// [`OptionError::Value`] for a name that is none.
    pub fn named(name: &str) -> Result<Self, OptionError> {
        one_of("kernels", name, &["lossless", "stock"])?;
        Ok(match name {
            "stock" => Self::Stock,
            _ => Self::Lossless,
        })
    }

    /// The value of the option `kernels`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lossless => "lossless",
            Self::Stock => "stock",
        }
    }
}

impl EngineOptions {
    /// Checks each option alone.
    ///
    /// # Errors
    /// [`OptionError::Value`] naming option, what is allowed and what was given.
    pub fn validate(&self) -> Result<(), OptionError> {
        one_of("dtype", &self.dtype, &["auto", "float32"])?;
        DeviceChoice::named(&self.device)?;
        WeightFormat::named(&self.weight_format)?;
        KernelSet::named(&self.kernels)?;
        one_of("head", &self.head, &["auto", "dense", "screened"])?;
        one_of("q_head", &self.q_head, &["auto", "exact", "int8"])?;
        let value = |option, expected: &str, got: String| {
            Err(OptionError::Value {
                option,
                expected: expected.into(),
                got,
            })
        };
        if !(1..=1024).contains(&self.max_num_seqs) {
            return value("max_num_seqs", "1..=1024", self.max_num_seqs.to_string());
        }
        if let Some(num_tokens) = self.max_num_batched_tokens
            && !(1..=MAX_BATCHED_TOKENS).contains(&num_tokens)
        {
            return value("max_num_batched_tokens", "1..=8192", num_tokens.to_string());
        }
        if !(self.gpu_memory_utilization > 0.0 && self.gpu_memory_utilization <= 1.0) {
            let got = self.gpu_memory_utilization.to_string();
            return value("gpu_memory_utilization", "above 0 and at most 1", got);
        }
        if self.max_model_len.is_some_and(|len| len < 2) {
            return value(
                "max_model_len",
                "at least 2",
                self.max_model_len.unwrap_or(0).to_string(),
            );
        }
        if let Some(num_threads) = self.num_threads
            && !(1..=MAX_THREADS).contains(&num_threads)
        {
            return value("num_threads", "1..=256", num_threads.to_string());
        }
        if self.q_passes > MAX_Q_PASSES {
            return value("q_passes", "0..=8", self.q_passes.to_string());
        }
        for tree_nodes in &self.tree_nodes {
            if !(1..=MAX_TREE_NODES).contains(tree_nodes) {
                return value("tree_nodes", "1..=64", tree_nodes.to_string());
            }
        }
        // One size stands for all trees.
        let in_q_passes = match self.tree_nodes.as_slice() {
            [size] if self.q_passes > 0 => std::slice::from_ref(size),
            [marked @ .., _] => marked,
            [] => &[],
        };
        if in_q_passes.contains(&1) {
            let expected = "2..=64 for a tree in which a Q pass marks a path";
            return value("tree_nodes", expected, format!("{:?}", self.tree_nodes));
        }
        for (option, sizes) in [
            ("tree_nodes", &self.tree_nodes),
            ("num_speculative_tokens", &self.num_speculative_tokens),
        ] {
            let num_trees = self.q_passes + 1;
            if !(sizes.len() <= 1 || sizes.len() == num_trees) {
                let expected = format!(
                    "one number, or one for each of the {num_trees} trees of {} Q passes",
                    self.q_passes
                );
                return value(option, &expected, format!("{sizes:?}"));
            }
        }
        if !(0.0..1.0).contains(&self.min_confidence) {
            let got = self.min_confidence.to_string();
            return value("min_confidence", "at least 0 and below 1", got);
        }
        Ok(())
    }
}

fn one_of(option: &'static str, got: &str, allowed: &[&str]) -> Result<(), OptionError> {
    if allowed.contains(&got) {
        return Ok(());
    }
    Err(OptionError::Value {
        option,
        expected: format!("one of {}", allowed.join(", ")),
        got: format!("\"{got}\""),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_written() {
        for (name, expected) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:17", DeviceChoice::Cuda(17)),
        ] {
            assert_eq!(DeviceChoice::named(name).unwrap(), expected);
        }
        for name in [
            "", "tpu", "CUDA", "cuda:", "cuda:+1", "cuda:-1", "cuda:1 ", "cuda:x",
        ] {
            let error = DeviceChoice::named(name).unwrap_err().to_string();
            assert!(error.contains("auto, cpu, cuda or cuda:N"), "{error}");
        }
    }
}
