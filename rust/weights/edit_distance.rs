//! Which of some names is most like a wanted one: for hints in errors, so small and exact rather than fast.

/// The candidate closest to `name`, if it is close enough to be a likely misspelling: same numbers in it (layer 3 is
/// no misspelling of layer 2) and at most a quarter of its last two dotted parts edited. The first of equals wins.
pub(super) fn nearest<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let numbers = |s: &str| -> Vec<String> {
        s.split(|c: char| !c.is_ascii_digit())
            .filter(|run| !run.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let tail = name.rsplit('.').take(2).map(str::len).sum::<usize>();
    let limit = (tail / 4).max(2);
    let wanted = numbers(name);
    candidates
        .filter(|c| c.len().abs_diff(name.len()) <= limit && numbers(c) == wanted)
        .map(|c| (levenshtein(name, c), c))
        .filter(|&(distance, _)| distance <= limit)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, c)| c)
}

/// Insertions, deletions and substitutions of bytes that turn `a` into `b`.
fn levenshtein(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_match_hand_counts() {
        for (a, b, distance) in [
            ("", "", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("gate_proj", "gate", 5),
            ("q_proj", "k_proj", 1),
        ] {
            assert_eq!(levenshtein(a, b), distance, "{a} {b}");
            assert_eq!(levenshtein(b, a), distance, "{b} {a}");
        }
    }

    #[test]
    fn only_likely_misspellings_are_named() {
        let names = [
            "model.layers.2.mlp.gate_proj.weight",
            "model.layers.3.mlp.gate_prj.weight",
            "model.norm.weight",
        ];
        let near = |name| nearest(name, names.into_iter());
        assert_eq!(
            near("model.layers.3.mlp.gate_proj.weight"),
            Some("model.layers.3.mlp.gate_prj.weight")
        );
        assert_eq!(near("model.layers.4.mlp.gate_proj.weight"), None);
        assert_eq!(near("lm_head.weight"), None);
    }
}
