//! Other speculation on a loaded engine: what shapes a step, not what is held, may change between requests.
//!
//! For measuring many ways to decode with weights that are read once. Texts that planted drafters go by come in here,
//! too.

use super::Engine;
use crate::error::{OptionError, Result};
use crate::model::head::HeadPath;
use crate::options::EngineOptions;
use crate::plan::Limits;

impl Engine {
    /// Decodes from now on as `options` say of trees, Q passes and LM head, plainly unless it `speculates`. What the
    /// engine holds stays, and so do all its other options.
    ///
    /// # Errors
    /// [`OptionError::Value`] while requests wait or run, and for anything larger than the engine was opened for: drafts,
    /// candidates, Q passes, a drafter or an INT8 copy of the head. Nothing changes then.
    pub fn switch_to(&mut self, speculates: bool, options: &EngineOptions) -> Result<()> {
        options.validate()?;
        let refused = |option, expected: String, got: String| {
            Err(OptionError::Value {
                option,
                expected,
                got,
            }
            .into())
        };
        if self.has_unfinished() {
            let got = "requests that wait or run".to_owned();
            return refused("speculation", "an idle engine to change it".to_owned(), got);
        }
        if speculates && self.draft_config.is_none() {
            let got = "one that was opened without a drafter".to_owned();
            return refused("speculation", "an engine with a drafter".to_owned(), got);
        }
        let drafter = self.draft_config.as_ref().filter(|_| speculates);
        let backend = self.device().backend();
        let wanted = Limits::resolve(options, self.config(), drafter, backend)?;
        let (now, most) = (&wanted.speculation, &self.opened.speculation);
        for (option, got, most) in [
            (
                "num_speculative_tokens",
                now.max_draft_tokens(),
                most.max_draft_tokens(),
            ),
            ("tree width", now.max_width(), most.max_width().max(1)),
            ("q_passes", now.q_passes(), most.q_passes()),
        ] {
            if got > most {
                let expected = format!("at most {most}, which the engine was opened for");
                return refused(option, expected, got.to_string());
            }
        }
        if wanted.head == HeadPath::Screened && self.opened.head == HeadPath::Dense {
            let expected = "dense, as the engine was opened".to_owned();
            return refused("head", expected, "\"screened\"".to_owned());
        }
        self.pair.target.set_head_path(wanted.head);
        let limits = &mut self.plan.limits;
        (limits.speculation, limits.head) = (wanted.speculation, wanted.head);
        let drafter = self.pair.drafter.take().or(self.idle_drafter.take());
        match speculates {
            true => self.pair.drafter = drafter,
            false => self.idle_drafter = drafter,
        }
        self.pair.target.keep_taps(speculates);
        Ok(())
    }

    /// Tells a planted drafter a whole text, prompt and output, as plain decoding gives it.
    ///
    /// # Errors
    /// [`OptionError::Value`] for an engine of files, whose drafter knows nothing but its weights.
    pub fn add_script(&mut self, token_ids: Vec<u32>) -> Result<()> {
        match &self.scripts {
            Some(scripts) => {
                scripts.add(token_ids);
                Ok(())
            }
            None => Err(OptionError::Value {
                option: "script",
                expected: "a planted engine".to_owned(),
                got: "one of files".to_owned(),
            }
            .into()),
        }
    }
}
