//! Drafters.

pub mod proposal;
use crate::{device::{Buffer,Device}, error::Result, model::{config::ModelConfig, weights::DecoderWeights}};
use std::path::Path;
#[derive(Clone, Copy)]
pub struct DraftAnchor { pub slot: usize, pub token_id: u32, pub position: usize }
#[derive(Clone, Copy)]
pub enum ScoreKind { Marginal { top_k: usize }, Conditional }
#[derive(Clone, Copy)]
pub struct DraftRequest { pub num_draft_tokens: usize, pub scores: ScoreKind }
pub trait Drafter: Send {
    fn method(&self) -> &'static str;
    fn taps(&self) -> &[usize];
    fn max_draft_tokens(&self) -> usize;
    fn has_conditional_scores(&self) -> bool;
    fn reserve(&mut self, slot: usize, n: usize) -> bool;
    fn release(&mut self, slot: usize);
    fn extend_context(&mut self, device: &Device, slot: usize, first_position: usize, taps: &[Buffer<f32>], rows: &[u32]) -> Result<()>;
    fn propose(&mut self, device: &Device, target: &DecoderWeights, anchors: &[DraftAnchor], wanted: DraftRequest) -> Result<Vec<proposal::Proposal>>;
}
pub fn open(_d: &Path, _t: &Path, _c: &ModelConfig, _dev: &Device, _s: usize, _p: usize) -> Result<Box<dyn Drafter>> { panic!() }
