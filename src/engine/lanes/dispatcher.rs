//! The dispatcher's thread: takes jobs whose gradients are done, keeps them in order of next use and gives chunks to the
//! lanes as they have room. It never waits for one event while other work is ready, and sleeps when there is none.

mod ending;
mod ranges;
mod staging;

pub(super) use ending::{Over, release_all};

use super::Shared;
use super::gpu::GpuLane;
use super::host::HostLane;
use super::job::{Job, Member, Work};
use super::parts::Chunk;
use super::queue::{Key, Queue};
use super::report::Landed;
use super::workers::Workers;
use crate::device::{Device, DeviceUpdate, Stream};
use crate::error::{Error, Result};
use crate::memory::{HostRing, HostSpan};
use ranges::{Ranges, span};
use rustc_hash::FxHashMap;
use staging::{Guard, Staging};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// Bundles of parameters with resident state in flight at once.
pub(super) const RESIDENT_TABLES: usize = 4;
/// How long the dispatcher sleeps between two looks at events that are not done: twice as long each time, up to the most.
/// A chunk takes some hundred microseconds.
const NAP: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(40));

/// A job whose gradients are done.
#[derive(Debug)]
struct Active<D: Device> {
    job: Job<D>,
    /// Elements not taken by a lane yet.
    untaken: usize,
    /// Elements whose work is not all in the device's streams yet.
    unissued: usize,
    /// Elements not landed yet.
    unlanded: usize,
    on_gpu: bool,
    on_cpu: bool,
    /// Whether any of it has failed: the rest is not to be uploaded.
    has_failed: bool,
}

/// An update of resident state under way.
#[derive(Debug)]
struct Resident<D: Device> {
    job: u64,
    done: D::Event,
    began: f64,
    table: Option<HostSpan>,
    staged: Vec<Guard>,
}

pub(super) struct Dispatcher<D: Device> {
    device: Arc<D>,
    shared: Arc<Shared<D>>,
    workers: Workers,
    gpu: Option<GpuLane<D>>,
    host: HostLane<D>,
    fifo: bool,
    next_id: u64,
    /// Jobs whose gradients may not be done, by the stream that produces them.
    pending: HashMap<usize, VecDeque<Job<D>>>,
    /// Jobs whose gradients are done and that wait for an earlier update of one of their slots to land.
    parked: VecDeque<Job<D>>,
    /// Whether one of them may go on.
    unblocked: bool,
    /// Jobs of each slot that have not ended, in the order in which they were accepted.
    turns: FxHashMap<usize, VecDeque<u64>>,
    active: HashMap<u64, Active<D>>,
    queue: Queue,
    resident: VecDeque<Resident<D>>,
    /// Jobs that have landed but for their gradients, which are being unscaled.
    unscaling: VecDeque<(u64, D::Event)>,
    resident_tables: HostRing,
    over: Sender<Over>,
    next_table: usize,
    ranges: Ranges,
    /// A failure after which nobody can say when the device is done with what it was given.
    lost: Option<Error>,
    broken: Option<String>,
}

impl<D: Device> Dispatcher<D> {
    pub(super) fn new(
        device: Arc<D>,
        shared: Arc<Shared<D>>,
        workers: Workers,
        gpu: Option<GpuLane<D>>,
        host: HostLane<D>,
        resident_tables: HostRing,
        over: Sender<Over>,
        (cpu_shares, fifo): (bool, bool),
    ) -> Self {
        let queue = Queue::new(gpu.is_some(), cpu_shares);
        Self {
            device,
            shared,
            workers,
            gpu,
            host,
            fifo,
            next_id: 0,
            pending: HashMap::new(),
            parked: VecDeque::new(),
            unblocked: false,
            turns: FxHashMap::default(),
            active: HashMap::new(),
            queue,
            resident: VecDeque::new(),
            unscaling: VecDeque::new(),
            resident_tables,
            over,
            next_table: 0,
            ranges: Ranges::default(),
            lost: None,
            broken: None,
        }
    }

    /// The thread's work, until the engine is dropped. A panic in it is a failure of all that was accepted.
    pub(super) fn run(mut self) {
        if let Err(cause) = crate::pool::attempt(|| self.work()) {
            self.give_up(&cause);
        }
    }

    fn work(&mut self) {
        crate::pool::sleep_precisely();
        if let Err(error) = self.device.enter_thread() {
            self.break_down(&error);
        }
        let mut nap = NAP.0;
        loop {
            let mut progress = self.take_messages();
            progress |= self.look();
            progress |= self.unpark();
            progress |= self.hand_out();
            if progress {
                self.publish();
                nap = NAP.0;
                continue;
            }
            let idle = self.is_idle();
            let state = self.shared.lock();
            if !state.inbox.is_empty() || !state.computed.is_empty() {
                continue;
            }
            if idle && state.stop {
                return;
            }
            // Spurious wake-ups only cost a look.
            let (wake, asleep_since) = (&self.shared.wake, self.shared.now());
            let mut state = if idle {
                wake.wait(state)
            } else {
                let woken = wake.wait_timeout(state, nap);
                nap = (nap * 2).min(NAP.1);
                woken
            };
            state.stats.dispatcher_sleep_seconds += self.shared.now() - asleep_since;
        }
    }

    fn is_idle(&self) -> bool {
        self.pending.values().all(VecDeque::is_empty) && self.active.is_empty() && self.parked.is_empty()
    }

    /// Takes new jobs, and what the workers have computed.
    fn take_messages(&mut self) -> bool {
        let (jobs, computed) = {
            let mut state = self.shared.lock();
            (std::mem::take(&mut state.inbox), std::mem::take(&mut state.computed))
        };
        let progress = !jobs.is_empty() || !computed.is_empty();
        for mut job in jobs {
            job.id = self.next_id;
            self.next_id += 1;
            for &Member { slot, .. } in &job.slots {
                self.turns.entry(slot).or_default().push_back(job.id);
            }
            self.pending.entry(job.producer).or_default().push_back(job);
        }
        for computed in computed {
            let id = self.host.job_of(&computed);
            self.note_broken(id, &computed.broken);
            if self.broken.is_some() {
                let landed = self.host.give_up(&computed);
                self.land(vec![landed]);
                continue;
            }
            let now = self.shared.now();
            if let Some(landed) = self.host.end_offload(&computed, now) {
                self.land(vec![landed]);
                continue;
            }
            let elements = computed.elements();
            if let Err(error) = self.host.upload(&self.device, computed, now, &mut self.lost) {
                self.fail(id, &error);
            }
            self.issued(id, elements);
        }
        progress
    }

    /// Looks at every event that may be done by now.
    fn look(&mut self) -> bool {
        if self.broken.is_some() {
            let all: Vec<Job<D>> =
                self.pending.values_mut().flat_map(std::mem::take).chain(self.parked.drain(..)).collect();
            let progress = !all.is_empty();
            for job in all {
                self.refuse(job);
            }
            return progress;
        }
        let (mut arrived, mut landed, mut unscaled) = (Vec::new(), Vec::new(), Vec::new());
        let looked = self.look_at_events(&mut arrived, &mut landed, &mut unscaled);
        let progress = !arrived.is_empty() || !landed.is_empty() || !unscaled.is_empty();
        // What has been seen is dealt with, whatever came of the next look.
        for job in arrived {
            self.arrive(job);
        }
        self.land(landed);
        for id in unscaled {
            self.finish(id);
        }
        match looked {
            Ok(more) => progress || more,
            Err(error) => {
                self.break_down(&error);
                true
            }
        }
    }

    fn look_at_events(
        &mut self,
        arrived: &mut Vec<Job<D>>,
        landed: &mut Vec<Landed>,
        unscaled: &mut Vec<u64>,
    ) -> Result<bool> {
        let now = self.shared.now();
        let mut progress = false;
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        for queue in self.pending.values_mut() {
            while let Some(job) = queue.front() {
                if !self.device.is_done(&job.ready)? {
                    break;
                }
                arrived.extend(queue.pop_front());
            }
        }
        self.pending.retain(|_, queue| !queue.is_empty());
        if let Some(gpu) = &mut self.gpu {
            gpu.poll(&self.device, now, self.shared.record_timeline.load(Ordering::Relaxed), landed)?;
        }
        let active = &self.active;
        let is_lost = |id: u64| active.get(&id).is_some_and(|active| active.has_failed);
        progress |= self.host.poll(&self.device, &self.workers, now, is_lost, landed)?;
        while let Some(resident) = self.resident.front() {
            if !self.device.is_done(&resident.done)? {
                break;
            }
            let Some(Resident { job, began, .. }) = self.resident.pop_front() else { break };
            let elements = self.active.get(&job).map_or(0, |active| active.unlanded);
            landed.push(Landed { job, elements, began, stages: None, issued: true, lane: "resident" });
        }
        while let Some((id, done)) = self.unscaling.front() {
            if !self.device.is_done(done)? {
                break;
            }
            unscaled.push(*id);
            self.unscaling.pop_front();
        }
        Ok(progress)
    }

    /// Lets those go on that waited for what has ended.
    fn unpark(&mut self) -> bool {
        let progress = self.unblocked;
        while std::mem::take(&mut self.unblocked) {
            // Each in turn: one that is still blocked is parked again.
            for job in std::mem::take(&mut self.parked) {
                self.arrive(job);
            }
        }
        progress
    }

    /// Puts a job whose gradients are done where it belongs.
    fn arrive(&mut self, job: Job<D>) {
        let is_first = |slot| self.turns.get(slot).is_none_or(|turns| turns.front() == Some(&job.id));
        if !job.slots.iter().all(|member| is_first(&member.slot)) {
            self.parked.push_back(job);
            return;
        }
        let (job, poisoned) = {
            let state = self.shared.lock();
            job.split(|slot| self.broken.is_some() || state.poisoned.contains(&slot))
        };
        if let Some(poisoned) = poisoned {
            self.refuse(poisoned);
        }
        let Some(job) = job else { return };
        let id = job.id;
        let (next_use, elements) = (if self.fifo { 0 } else { job.next_use }, job.elements);
        let is_resident = matches!(job.work, Work::Resident(_));
        let (untaken, unissued, unlanded) = (elements, elements, elements);
        let (on_gpu, on_cpu, has_failed) = (false, false, false);
        let active = Active { job, untaken, unissued, unlanded, on_gpu, on_cpu, has_failed };
        if is_resident {
            self.active.insert(id, active);
            self.start_resident(id);
        } else {
            self.queue.insert((next_use, id), &active.job.work);
            self.active.insert(id, active);
        }
    }

    /// One launch: the state is where the weights are.
    fn start_resident(&mut self, id: u64) {
        let began = self.shared.now();
        let job = self.active.get(&id).map(|active| &active.job);
        let run = (0, job.map_or(0, |job| job.elements));
        self.ranges.begin((&*self.device, &*self.shared), job, "resident", began, run);
        let result = self.launch_resident(id, began);
        let Some(active) = self.active.get_mut(&id) else { return };
        active.on_gpu = true;
        active.untaken = 0;
        let elements = active.unissued;
        match result {
            Ok(()) => {
                self.shared.lock().stats.resident_elements += elements as u64;
                self.issued(id, elements);
            }
            Err(error) => {
                self.fail(id, &error);
                self.land(vec![Landed { job: id, elements, began, stages: None, issued: false, lane: "resident" }]);
            }
        }
    }

    fn launch_resident(&mut self, id: u64, began: f64) -> Result<()> {
        let Some(Active { job: Job { work: Work::Resident(parts), .. }, .. }) = self.active.get(&id) else {
            return Ok(());
        };
        let mut updates: Vec<DeviceUpdate<'_>> = Work::resident_updates(parts);
        let mut staging = Staging::new(&self.device);
        for ((.., grad, _), update) in parts.iter().zip(&mut updates) {
            staging.bring(grad, update)?;
        }
        let mut table = None;
        if let [update] = &updates[..] {
            self.device.update(update, Stream::Update)?;
        } else {
            let slot = self.next_table;
            self.next_table = (slot + 1) % RESIDENT_TABLES;
            let mut lent = self.resident_tables.lend(slot);
            while lent.is_none() {
                // All tables are out: the oldest launch takes microseconds.
                let with_table = |resident: &&mut Resident<D>| resident.table.is_some();
                let Some(oldest) = self.resident.iter_mut().find(with_table) else { break };
                self.device.wait(&oldest.done)?;
                oldest.table = None;
                lent = self.resident_tables.lend(slot);
            }
            let table = table.insert(lent.expect("nobody has the table"));
            self.device.update_many(table, &updates, Stream::Update)?;
        }
        match self.mark(Stream::Update) {
            Ok(done) => {
                self.resident.push_back(Resident { job: id, done, began, table, staged: staging.started() });
                Ok(())
            }
            Err(error) => {
                self.drain(&[Stream::Update]);
                Err(error)
            }
        }
    }

    /// Gives chunks to the lanes while there are some and they have room: to each lane in turn, in order of next use.
    fn hand_out(&mut self) -> bool {
        let mut progress = false;
        while !self.queue.is_empty() && self.broken.is_none() {
            let to_host = self.give_to_host();
            let to_gpu = self.give_to_gpu();
            progress |= to_host || to_gpu;
            if !to_host && !to_gpu {
                break;
            }
        }
        progress
    }

    fn give_to_host(&mut self) -> bool {
        if !self.host.has_room() {
            return false;
        }
        if self.give_offload() {
            return true;
        }
        let Some(first) = self.queue.first_for_cpu_lane() else { return false };
        let host = &self.host;
        let Some((key, chunks)) = take(&mut self.queue, &mut self.active, first, |chunk| host.chunk_len(chunk)) else {
            return false;
        };
        let now = self.shared.now();
        if let Some(active) = self.active.get_mut(&key) {
            active.on_cpu = true;
            self.ranges.begin((&*self.device, &*self.shared), Some(&active.job), "cpu lane", now, span(&chunks));
        }
        if let Err(error) = self.host.start(&self.device, key, chunks, now, &mut self.lost) {
            self.fail(key, &error);
        }
        true
    }

    /// Gives the CPU lane the next run of a gradient that is to leave the device.
    fn give_offload(&mut self) -> bool {
        let Some(key) = self.queue.first_offload() else { return false };
        let Some(active) = self.active.get_mut(&key.1) else { return false };
        let Work::Offload(rest) = &mut active.job.work else { return false };
        let run = rest.split_front(self.host.offload_len(rest));
        let first = active.job.elements - active.untaken;
        active.untaken -= run.len;
        if active.untaken == 0 {
            self.queue.remove(key);
        }
        let now = self.shared.now();
        let of_run = (first, first + run.len);
        self.ranges.begin((&*self.device, &*self.shared), Some(&active.job), "cpu lane", now, of_run);
        if let Err(error) = self.host.start_offload(&self.device, key.1, run, now, &mut self.lost) {
            self.fail(key.1, &error);
        }
        true
    }

    fn give_to_gpu(&mut self) -> bool {
        let Some(gpu) = self.gpu.as_mut().filter(|gpu| gpu.has_room()) else { return false };
        let Some(first) = self.queue.first_for_gpu_lane() else { return false };
        let taken = {
            let gpu = &*gpu;
            take(&mut self.queue, &mut self.active, first, |chunk| gpu.chunk_len(chunk))
        };
        let Some((key, chunks)) = taken else { return false };
        let elements = chunks.iter().map(|chunk| chunk.len).sum();
        let now = self.shared.now();
        let job = self.active.get(&key).map(|active| &active.job);
        self.ranges.begin((&*self.device, &*self.shared), job, "gpu lane", now, span(&chunks));
        let started = gpu.start(&self.device, key, chunks, now, &mut self.lost);
        if let Some(active) = self.active.get_mut(&key) {
            active.on_gpu = true;
        }
        if let Err(error) = started {
            self.fail(key, &error);
        }
        self.issued(key, elements);
        true
    }

    /// Tells `stats()` how things stand.
    fn publish(&self) {
        let (gpu, cpu) = (self.gpu.as_ref().map_or(0, GpuLane::in_flight), self.host.in_flight());
        let mut state = self.shared.lock();
        let stats = &mut state.stats;
        stats.in_flight = (stats.in_flight.0.max(gpu), stats.in_flight.1.max(cpu));
        stats.cpu = self.host.totals;
        (stats.offload, stats.adding_seconds) = (self.host.offload, self.host.adding_seconds);
        stats.compute_seconds = self.host.compute_seconds;
        if let Some(gpu) = &self.gpu {
            stats.gpu = gpu.totals;
        }
    }
}

/// Takes the next chunk of a job in the queue, or its whole bundle; what is taken to the end leaves the queue.
fn take<D: Device>(
    queue: &mut Queue,
    active: &mut HashMap<u64, Active<D>>,
    key: Key,
    len: impl Fn(&Chunk) -> usize,
) -> Option<(u64, Vec<Chunk>)> {
    let entry = active.get_mut(&key.1)?;
    let chunks = match &mut entry.job.work {
        Work::Resident(_) | Work::Offload(_) => return None,
        Work::Bundle(chunks) => std::mem::take(chunks),
        Work::Chunks(rest) => {
            let len = len(rest);
            vec![rest.split_front(len)]
        }
    };
    entry.untaken -= chunks.iter().map(|chunk| chunk.len).sum::<usize>();
    if entry.untaken == 0 {
        queue.remove(key);
    }
    Some((key.1, chunks))
}
