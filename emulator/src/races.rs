//! Finds accesses to shared memory that nothing orders: `PTX_EMULATOR_CHECK=races`.
//!
//! Every warp has a clock of what is ordered before its next step. Barriers of the block and the cluster and mbarriers
//! carry clocks from those who arrive to those who wait; lanes of a warp count as ordered. What a warp starts and others
//! finish is an actor of its own, ordered before those only who waited for it: copies of a warp's threads, its
//! asynchronous matrix products (which read), and all that counts its bytes at one mbarrier. Accesses are noted when they
//! are issued, so that what is found depends little on the schedule.

use std::collections::HashMap;

use crate::async_ops::SharedPlace;
use crate::fault::{Fault, Place};
use crate::race_cells::{Cells, Clock, Conflict, Stamp, Touch};

/// The environment variable that says what is checked besides.
pub const CHECK_VARIABLE: &str = "PTX_EMULATOR_CHECK";

/// The environment variable that lists, by prefixes of names, kernels that read ahead on purpose and drop what they read:
/// plain reads of theirs are not watched.
pub const UNWATCHED_VARIABLE: &str = "PTX_EMULATOR_UNWATCHED_READS";

/// Bytes of an mbarrier.
const MBARRIER_BYTES: u32 = 8;

/// Whether the environment asks for this check.
pub fn is_wanted() -> Result<bool, Fault> {
    match std::env::var(CHECK_VARIABLE).as_deref() {
        Err(_) | Ok("") => Ok(false),
        Ok("races") => Ok(true),
        Ok(other) => Err(Fault::Unsupported {
            what: format!("{CHECK_VARIABLE} is `{other}`, expected `races`"),
            place: None,
        }),
    }
}

/// The instruction that does something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Index of the block in the grid.
    pub block: u32,
    /// Index of the warp in the block.
    pub warp: u32,
    /// Line of the PTX text, from one.
    pub line: u32,
}

/// Which of a warp's actors finishes something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// `cp.async` of its threads.
    Copies,
    /// `wgmma`.
    Products,
}

/// An actor of a cluster that is no warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Agent {
    Engine(u32, Engine),
    Mbarrier(SharedPlace),
}

/// What an mbarrier carries.
#[derive(Debug, Default)]
struct Carried {
    /// From those who have arrived.
    arriving: Clock,
    /// From those who had arrived when its last phase ended.
    complete: Clock,
}

/// A cluster that runs.
#[derive(Debug)]
struct Cluster {
    /// Of warps, by their number in the cluster.
    clocks: Vec<Clock>,
    /// Of each actor, warps first: the step that it does.
    steps: Vec<u32>,
    agents: HashMap<Agent, u32>,
    agent_names: Vec<Agent>,
    /// Of blocks, by rank.
    memories: Vec<Cells>,
    mbarriers: HashMap<SharedPlace, Carried>,
    /// From those who have arrived at the cluster's barrier.
    arriving: Clock,
    /// Steps of a warp's engine at the ends of groups that nobody has waited for.
    groups: HashMap<(u32, Engine), Vec<u32>>,
    num_ended: u32,
}

/// All clusters that run.
#[derive(Debug)]
pub struct Races {
    kernel: String,
    cluster_blocks: u32,
    block_warps: u32,
    watches_reads: bool,
    clusters: HashMap<u32, Cluster>,
}

impl Races {
    /// The check of a launch.
    pub fn new(kernel: &str, cluster_blocks: u32, block_warps: u32) -> Self {
        Self {
            kernel: kernel.to_owned(),
            cluster_blocks,
            block_warps,
            watches_reads: true,
            clusters: HashMap::new(),
        }
    }

    /// Without plain reads of warps if `prefixes` (divided by commas) holds one of the kernel's name.
    pub fn without_reads_of(self, prefixes: &str) -> Self {
        let is_named = (prefixes.split(',').filter(|prefix| !prefix.is_empty()))
            .any(|prefix| self.kernel.starts_with(prefix));
        Self {
            watches_reads: !is_named,
            ..self
        }
    }

    /// A cluster's start.
    pub fn start_cluster(&mut self, cluster: u32) {
        let num_warps = self.cluster_blocks * self.block_warps;
        let fresh = (0..num_warps).map(|warp| {
            let mut clock = Clock::default();
            clock.raise(warp, 1);
            clock
        });
        let state = Cluster {
            clocks: fresh.collect(),
            steps: vec![1; num_warps as usize],
            agents: HashMap::new(),
            agent_names: Vec::new(),
            memories: (0..self.cluster_blocks).map(|_| Cells::default()).collect(),
            mbarriers: HashMap::new(),
            arriving: Clock::default(),
            groups: HashMap::new(),
            num_ended: 0,
        };
        self.clusters.insert(cluster, state);
    }

    /// The end of a block, whose memory nobody may reach any more.
    pub fn end_block(&mut self, block: u32) {
        let (index, rank, num_blocks) = self.rank(block);
        let (cluster, _) = self.find(block, 0);
        cluster.memories[rank as usize] = Cells::default();
        cluster.num_ended += 1;
        if cluster.num_ended == num_blocks {
            self.clusters.remove(&index);
        }
    }

    /// An access of a warp.
    pub fn touch(
        &mut self,
        site: Site,
        at: SharedPlace,
        num_bytes: u32,
        touch: Touch,
    ) -> Result<(), Fault> {
        if touch == Touch::Read && !self.watches_reads {
            return Ok(());
        }
        let (_, rank, _) = self.rank(at.block);
        let (cluster, warp) = self.find(site.block, site.warp);
        let stamp = cluster.stamp(warp, site);
        let clock = &cluster.clocks[warp as usize];
        let result =
            cluster.memories[rank as usize].touch((at.offset, num_bytes), touch, stamp, clock);
        result.map_err(|conflict| self.race(conflict, site, at, touch))
    }

    /// An access of one of a warp's engines. Those of one engine count as ordered.
    pub fn touch_by_engine(
        &mut self,
        site: Site,
        engine: Engine,
        at: SharedPlace,
        num_bytes: u32,
        touch: Touch,
    ) -> Result<(), Fault> {
        let (_, rank, _) = self.rank(at.block);
        let (cluster, warp) = self.find(site.block, site.warp);
        let actor = cluster.actor(Agent::Engine(warp, engine));
        let stamp = cluster.stamp(actor, site);
        let mut clock = cluster.clocks[warp as usize].clone();
        clock.raise(actor, stamp.step);
        let result =
            cluster.memories[rank as usize].touch((at.offset, num_bytes), touch, stamp, &clock);
        result.map_err(|conflict| self.race(conflict, site, at, touch))
    }

    /// A write whose bytes count at an mbarrier.
    pub fn touch_by_flight(
        &mut self,
        site: Site,
        to: SharedPlace,
        num_bytes: u32,
        barrier: SharedPlace,
    ) -> Result<(), Fault> {
        self.touch(site, barrier, MBARRIER_BYTES, Touch::Atomic)?;
        let (_, rank, _) = self.rank(to.block);
        let (cluster, warp) = self.find(site.block, site.warp);
        let actor = cluster.actor(Agent::Mbarrier(barrier));
        cluster.steps[actor as usize] += 1;
        let stamp = cluster.stamp(actor, site);
        let clock = &cluster.clocks[warp as usize];
        let carried = cluster.mbarriers.entry(barrier).or_default();
        carried.arriving.join(clock);
        carried.arriving.raise(actor, stamp.step);
        let result = cluster.memories[rank as usize].touch(
            (to.offset, num_bytes),
            Touch::Write,
            stamp,
            clock,
        );
        result.map_err(|conflict| self.race(conflict, site, to, Touch::Write))
    }

    /// `mbarrier.init`.
    pub fn init_mbarrier(&mut self, site: Site, at: SharedPlace) -> Result<(), Fault> {
        self.touch(site, at, MBARRIER_BYTES, Touch::Write)?;
        let (cluster, _) = self.find(site.block, site.warp);
        cluster.mbarriers.insert(at, Carried::default());
        Ok(())
    }

    /// An arrival at an mbarrier, before it is counted; with `engine` one that happens when what that does has landed.
    pub fn arrive_at_mbarrier(
        &mut self,
        site: Site,
        at: SharedPlace,
        engine: Option<Engine>,
    ) -> Result<(), Fault> {
        self.touch(site, at, MBARRIER_BYTES, Touch::Atomic)?;
        let (cluster, warp) = self.find(site.block, site.warp);
        let mut clock = cluster.clocks[warp as usize].clone();
        if let Some(engine) = engine {
            let actor = cluster.actor(Agent::Engine(warp, engine));
            clock.raise(actor, cluster.steps[actor as usize]);
            cluster.steps[actor as usize] += 1;
        }
        cluster
            .mbarriers
            .entry(at)
            .or_default()
            .arriving
            .join(&clock);
        cluster.advance(warp);
        Ok(())
    }

    /// The end of an mbarrier's phase.
    pub fn end_phase(&mut self, at: SharedPlace) {
        let (cluster, _) = self.find(at.block, 0);
        let carried = cluster.mbarriers.entry(at).or_default();
        carried.complete = carried.arriving.clone();
    }

    /// A look at an mbarrier, and whether its phase was complete.
    pub fn test_mbarrier(
        &mut self,
        site: Site,
        at: SharedPlace,
        is_complete: bool,
    ) -> Result<(), Fault> {
        self.touch(site, at, MBARRIER_BYTES, Touch::Atomic)?;
        let (cluster, warp) = self.find(site.block, site.warp);
        if let Some(carried) = cluster.mbarriers.get(&at).filter(|_| is_complete) {
            cluster.clocks[warp as usize].join(&carried.complete);
        }
        Ok(())
    }

    /// Warps of a block leave one of its barriers together.
    pub fn meet(&mut self, block: u32, warps: impl Iterator<Item = u32>) {
        let (cluster, first) = self.find(block, 0);
        let warps: Vec<u32> = warps.map(|warp| first + warp).collect();
        let mut all = Clock::default();
        for &warp in &warps {
            all.join(&cluster.clocks[warp as usize]);
        }
        for warp in warps {
            cluster.clocks[warp as usize] = all.clone();
            cluster.advance(warp);
        }
    }

    /// An arrival at the cluster's barrier.
    pub fn arrive_at_cluster(&mut self, block: u32, warp: u32) {
        let (cluster, warp) = self.find(block, warp);
        cluster.arriving.join(&cluster.clocks[warp as usize]);
        cluster.advance(warp);
    }

    /// A warp goes on behind the cluster's barrier. Who is a round ahead may have arrived again already and counts as
    /// ordered before, too.
    pub fn leave_cluster(&mut self, block: u32, warp: u32) {
        let (cluster, warp) = self.find(block, warp);
        cluster.clocks[warp as usize].join(&cluster.arriving);
    }

    /// The end of a group of what an engine does.
    pub fn commit(&mut self, block: u32, warp: u32, engine: Engine) {
        let (cluster, warp) = self.find(block, warp);
        let actor = cluster.actor(Agent::Engine(warp, engine));
        let step = cluster.steps[actor as usize];
        cluster.steps[actor as usize] += 1;
        cluster.groups.entry((warp, engine)).or_default().push(step);
    }

    /// A wait for all but the last `num_left` groups.
    pub fn wait(&mut self, block: u32, warp: u32, engine: Engine, num_left: usize) {
        let (cluster, warp) = self.find(block, warp);
        let actor = cluster.actor(Agent::Engine(warp, engine));
        let groups = cluster.groups.entry((warp, engine)).or_default();
        if let Some(at) = groups.len().checked_sub(num_left + 1) {
            cluster.clocks[warp as usize].raise(actor, groups[at]);
            groups.drain(..=at);
        }
    }

    /// The cluster of a block, its rank there, and how many blocks a cluster has.
    fn rank(&self, block: u32) -> (u32, u32, u32) {
        let num_blocks = self.cluster_blocks;
        (block / num_blocks, block % num_blocks, num_blocks)
    }

    /// The cluster of a block, and the number there of one of its warps.
    fn find(&mut self, block: u32, warp: u32) -> (&mut Cluster, u32) {
        let (index, rank, _) = self.rank(block);
        let cluster = self.clusters.get_mut(&index).expect("its blocks run");
        (cluster, rank * self.block_warps + warp)
    }

    fn race(&mut self, conflict: Conflict, site: Site, at: SharedPlace, touch: Touch) -> Fault {
        let Conflict {
            earlier,
            touch: former,
        } = conflict;
        let (block_warps, first_block) = (self.block_warps, site.block - self.rank(site.block).1);
        let (cluster, _) = self.find(site.block, site.warp);
        let whose = match (earlier.actor as usize).checked_sub(cluster.clocks.len()) {
            None => {
                let block = first_block + earlier.actor / block_warps;
                format!("of block {block}, warp {}", earlier.actor % block_warps)
            }
            Some(agent) => match cluster.agent_names[agent] {
                Agent::Engine(_, Engine::Copies) => "of a cp.async not waited for".to_owned(),
                Agent::Engine(_, Engine::Products) => "of a wgmma not waited for".to_owned(),
                Agent::Mbarrier(barrier) => {
                    let SharedPlace { block, offset } = barrier;
                    format!(
                        "of a copy whose bytes count at block {block}'s mbarrier at offset {offset}"
                    )
                }
            },
        };
        let what = format!(
            "the {} {} bytes into block {}'s shared memory is not ordered after the {} at PTX line {} {whose}",
            name(touch),
            at.offset,
            at.block,
            name(former),
            earlier.line,
        );
        let place = Place {
            kernel: self.kernel.clone(),
            line: site.line,
            block: site.block,
            warp: site.warp,
            lane: None,
        };
        Fault::Race {
            what,
            place: Some(place),
        }
    }
}

fn name(touch: Touch) -> &'static str {
    match touch {
        Touch::Read => "read",
        Touch::Write => "write",
        Touch::Atomic => "atomic access",
    }
}

impl Cluster {
    /// The number of an actor that is no warp.
    fn actor(&mut self, agent: Agent) -> u32 {
        let (steps, names) = (&mut self.steps, &mut self.agent_names);
        *self.agents.entry(agent).or_insert_with(|| {
            steps.push(1);
            names.push(agent);
            steps.len() as u32 - 1
        })
    }

    /// The current step of an actor.
    fn stamp(&self, actor: u32, site: Site) -> Stamp {
        Stamp {
            actor,
            step: self.steps[actor as usize],
            line: site.line,
        }
    }

    /// What a warp does from now on is not ordered before what it passed on so far.
    fn advance(&mut self, warp: u32) {
        let step = &mut self.steps[warp as usize];
        *step += 1;
        self.clocks[warp as usize].raise(warp, *step);
    }
}

#[cfg(test)]
#[path = "races_tests.rs"]
mod tests;
