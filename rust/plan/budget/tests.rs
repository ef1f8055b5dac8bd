//! Pages of two kinds from one memory, handed out by hand.

use super::*;
use crate::device::Backend;
use crate::model::config::{LayerConfig, ModelConfig};
use crate::options::{EngineOptions, WeightFormat};
use crate::plan::Limits;
use crate::plan::footprint::Holdings;
use crate::plan::tests::{options, published};

/// The footprint of Gemma 4 12B on a GPU.
fn gemma(max_model_len: usize, max_num_seqs: usize) -> Footprint {
    gemma_with(max_model_len, max_num_seqs, |_| {})
}

/// As [`gemma`], of a model with other layers.
fn gemma_with(
    max_model_len: usize,
    max_num_seqs: usize,
    edit: impl FnOnce(&mut ModelConfig),
) -> Footprint {
    let mut config = ModelConfig::read(&published("gemma-4-12b")).unwrap();
    edit(&mut config);
    let options = EngineOptions {
        max_model_len: Some(max_model_len),
        ..options(max_num_seqs)
    };
    let limits = Limits::resolve(&options, &config, None, Backend::Cuda).unwrap();
    Footprint::of(&Holdings {
        config: &config,
        headers: None,
        drafter: None,
        drafter_headers: None,
        drafter_format: WeightFormat::Auto,
        limits: &limits,
        format: WeightFormat::Bf16,
        backend: Backend::Cuda,
    })
}

/// A budget that leaves `num_bytes` beside `footprint`.
fn leaving(footprint: &Footprint, num_bytes: u64) -> Budget {
    Budget {
        memory_bytes: footprint.fixed_bytes() + num_bytes,
        utilization: 1.0,
    }
}

// Keys and values in fp32 of 64 positions: eight full layers of one head of 512, forty sliding ones of eight of 256.
const WHOLE: u64 = 64 * 8 * 2 * 512 * 4;
const WINDOW: u64 = 64 * 40 * 2 * 8 * 256 * 4;
// 1,023 positions before a row.
const RING: usize = 16;

#[test]
fn pages_go_to_one_long_request_then_to_windows_then_to_contexts() {
    // 6,400 tokens are 100 pages.
    let footprint = gemma(6_400, 3);
    assert_eq!(
        (footprint.kv_page.whole, footprint.kv_page.window),
        (WHOLE, WINDOW)
    );
    assert_eq!(
        (footprint.ring_pages, footprint.pages_per_sequence),
        (RING, 100)
    );
    let ring = RING as u64;
    for (num_bytes, whole, window) in [
        (0, 0, 0),
        (WHOLE + WINDOW - 1, 0, 0),
        // As long as a request's window does not fit, context beyond it is of no use.
        (15 * (WHOLE + WINDOW) + 20 * WHOLE, 15, 15),
        (ring * (WHOLE + WINDOW) + 7 * WHOLE, 23, 16),
        (ring * WINDOW + 100 * WHOLE, 100, 16),
        (
            ring * WINDOW + 100 * WHOLE + 5 * (WHOLE + WINDOW) + WINDOW,
            125,
            21,
        ),
        (3 * ring * WINDOW + 132 * WHOLE, 132, 48),
        (3 * ring * WINDOW + 140 * WHOLE + WHOLE - 1, 140, 48),
        // More than all requests use: whoever takes from the pool has the last word.
        (3 * ring * WINDOW + 500 * WHOLE, 500, 48),
    ] {
        let expected = PerSpan { whole, window };
        let pool = leaving(&footprint, num_bytes).pool(&footprint);
        let unused = num_bytes - footprint.pool_bytes(pool);
        assert!(window < RING || unused < WHOLE, "a page more would fit");
        assert_eq!(pool, expected, "{num_bytes}");
    }
}

/// Every split of a memory tried: none gives a larger share of what could run to both who fill a window and who go on
/// from there; and one request of any length that is let in fits, in no more bytes than there are.
#[test]
fn windows_and_contexts_are_balanced() {
    let ring = RING as u64;
    let mut num_cut = 0;
    for max_model_len in [700, 2_048, 32_768, 131_072, 262_144] {
        for num_slots in [1, 3, 8, 29, 64] {
            let footprint = gemma(max_model_len, num_slots);
            let longest = footprint.pages_per_sequence as u64;
            let window = ring.min(longest);
            let middle = ((window * longest) as f64).sqrt() as u64;
            let one = window * WINDOW + longest * WHOLE;
            for num_bytes in [
                one,
                one + 7 * WINDOW,
                2 * one + WHOLE,
                4 * one,
                46_400_000_000,
            ] {
                if num_bytes < one {
                    continue;
                }
                let budget = leaving(&footprint, num_bytes);
                let pool = budget.pool(&footprint);
                assert!(footprint.pool_bytes(pool) <= num_bytes);
                assert!(num_bytes - footprint.pool_bytes(pool) < WHOLE);
                let full = footprint.pages_of(max_model_len);
                assert!(pool.whole >= full.whole && pool.window >= full.window);

                let slots = num_slots as u64;
                let beside_one = (num_bytes - one) / (WHOLE + WINDOW);
                let most = window + beside_one.min(window * (slots - 1));
                let possible = slots.min(num_bytes / (window * WINDOW + middle * WHOLE));
                let shares = |num_windows: u64| {
                    let contexts = (num_bytes - num_windows * WINDOW) / WHOLE / middle;
                    let of_contexts = (contexts as f64 / possible as f64).min(1.0);
                    of_contexts.min(num_windows as f64 / most as f64)
                };
                let best = (window..=most).map(shares).fold(0.0, f64::max);
                let got = shares(pool.window as u64);
                assert_eq!(
                    got, best,
                    "{max_model_len} {num_slots} {num_bytes}: {pool:?}"
                );
                num_cut += usize::from((pool.window as u64) < most);
            }
        }
    }
    assert!(
        num_cut > 5,
        "windows are given up for contexts {num_cut} times"
    );
}

#[test]
fn the_longest_request_pays_for_its_window_once() {
    let ring = RING as u64;
    let footprint = gemma(6_400, 3);
    for (num_bytes, pages) in [
        (0, 0),
        (3 * (WHOLE + WINDOW) + 5 * WHOLE, 3),
        (ring * (WHOLE + WINDOW), 16),
        (ring * WINDOW + 4096 * WHOLE, 4096),
    ] {
        let budget = leaving(&footprint, num_bytes);
        assert_eq!(budget.longest_request(&footprint), pages);
    }
}

#[test]
fn full_requests_are_those_that_pools_serve() {
    let ring = RING as u64;
    let one = ring * WINDOW + 100 * WHOLE;
    let footprint = gemma(6_400, 3);
    for (num_bytes, requests) in [
        (one - 1, 0),
        (one, 1),
        (2 * one, 1),
        (3 * one, 3),
        (10 * one, 10),
    ] {
        let budget = leaving(&footprint, num_bytes);
        let pool = budget.pool(&footprint);
        assert_eq!(
            budget.full_requests(&footprint, pool),
            requests,
            "{num_bytes}"
        );
    }
}

/// Forty sliding layers alone: context takes nothing, and windows say how much of it can be used.
#[test]
fn context_without_layers_that_keep_it_is_what_windows_serve() {
    let ring = RING as u64;
    let sliding = |layer: &LayerConfig| match layer {
        LayerConfig::Attention(attention) => attention.window.is_some(),
        LayerConfig::GatedDelta => false,
    };
    let footprint = gemma_with(6_400, 3, |config| config.layers.retain(sliding));
    assert_eq!(footprint.page_bytes().whole, 0);
    assert_eq!(footprint.page_bytes().window, WINDOW);
    // A whole window lets a request have its 100 pages, part of one only as many as it has itself.
    for (num_bytes, whole, window, requests) in [
        (0, 0, 0, 0),
        (15 * WINDOW, 15, 15, 0),
        (ring * WINDOW, 100, 16, 1),
        (20 * WINDOW + WINDOW / 2, 104, 20, 1),
        (2 * ring * WINDOW, 200, 32, 2),
        (3 * ring * WINDOW, 300, 48, 3),
        (90 * ring * WINDOW, 300, 48, 90),
    ] {
        let budget = leaving(&footprint, num_bytes);
        let pool = budget.pool(&footprint);
        assert_eq!(pool, PerSpan { whole, window }, "{num_bytes}");
        assert_eq!(budget.full_requests(&footprint, pool), requests);
    }
}

/// Recurrent layers alone: no pages, and a memory that lacks a byte of the rest holds no context.
#[test]
fn without_attention_slots_are_what_there_is() {
    let footprint = Footprint {
        kv_page: PerSpan::default(),
        ring_pages: 0,
        ..gemma(6_400, 3)
    };
    let budget = leaving(&footprint, 0);
    let pool = budget.pool(&footprint);
    assert_eq!(pool, PerSpan::whole_only(300));
    assert_eq!(budget.full_requests(&footprint, pool), 3);
    let budget = Budget {
        memory_bytes: footprint.fixed_bytes() - 1,
        utilization: 1.0,
    };
    assert_eq!(budget.pool(&footprint), PerSpan::default());
    assert_eq!(budget.longest_request(&footprint), 0);
    let error = budget.require(&footprint, 64).unwrap_err().to_string();
    assert!(!error.contains("lower max_model_len to"), "{error}");
}
