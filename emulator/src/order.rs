//! The schedule: who runs next, and when what is in flight lands.
//!
//! A kernel must compute the same under every order that the programming model allows. The emulator can run three:
//! the friendliest, one that holds back everything asynchronous until somebody must have it, and seeded random ones.

/// Which schedule to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Warps take turns; asynchronous work is done at once.
    First,
    /// Warps take turns; asynchronous work is done only when a wait demands it or nobody can go on.
    Late,
    /// Turns, their lengths and the time of asynchronous work are drawn.
    Random,
}

/// A schedule with its generator's state; equal seeds draw equal schedules.
#[derive(Debug, Clone)]
pub struct Order {
    policy: Policy,
    state: u64,
}

/// The environment variable that names the schedule.
pub const ORDER_VARIABLE: &str = "PTX_EMULATOR_ORDER";

impl Order {
    /// A schedule without draws.
    pub fn new(policy: Policy, seed: u64) -> Self {
        Order {
            policy,
            state: seed,
        }
    }

    /// Reads `first`, `late` or `random:SEED`; an unset variable means `first`.
    pub fn from_env() -> Result<Self, String> {
        std::env::var(ORDER_VARIABLE)
            .map_or(Ok(Order::new(Policy::First, 0)), |text| Order::parse(&text))
    }

    /// Reads `first`, `late` or `random:SEED`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let seed = text
            .strip_prefix("random:")
            .and_then(|seed| seed.parse().ok());
        match (text, seed) {
            ("first", _) => Ok(Order::new(Policy::First, 0)),
            ("late", _) => Ok(Order::new(Policy::Late, 0)),
            (_, Some(seed)) => Ok(Order::new(Policy::Random, seed)),
            _ => Err(format!(
                "{ORDER_VARIABLE} is `{text}`, expected `first`, `late` or `random:SEED`"
            )),
        }
    }

    /// Which schedule this is.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// A draw below `bound`, which is not zero.
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.draw() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// One step of the splitmix64 generator.
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_are_read_and_others_refused() {
        assert_eq!(
            Order::parse("late").map(|order| order.policy()),
            Ok(Policy::Late)
        );
        assert_eq!(
            Order::parse("random:7").map(|order| order.policy()),
            Ok(Policy::Random)
        );
        assert!(Order::parse("random").is_err() && Order::parse("random:x").is_err());
    }

    #[test]
    fn equal_seeds_draw_equal_numbers_in_range() {
        let mut one = Order::new(Policy::Random, 3);
        let mut other = one.clone();
        let mut seen = [0u32; 5];
        for _ in 0..1000 {
            let draw = one.below(5);
            assert_eq!(draw, other.below(5));
            seen[draw as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 150), "{seen:?}");
    }
}
