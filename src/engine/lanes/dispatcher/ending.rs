//! How jobs end: issued, landed, failed; what callers are told, and when their tensors go.

use super::{Active, Dispatcher, Resident};
use crate::device::{Device, Stream};
use crate::engine::lanes::job::{Job, Member, Work};
use crate::engine::lanes::report::{Landed, stretches};
use crate::engine::lanes::workers::Broken;
use crate::engine::lanes::{Shared, State};
use crate::error::{Error, Failure, Result};
use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;

impl<D: Device> Dispatcher<D> {
    /// Counts elements of a job as given to the device; once all are, streams may follow.
    pub(super) fn issued(&mut self, id: u64, elements: usize) {
        let Some(active) = self.active.get_mut(&id) else { return };
        active.unissued -= elements;
        if active.unissued > 0 || !active.job.unscale.is_empty() {
            return;
        }
        self.announce(id);
    }

    /// Lets streams follow a job.
    fn announce(&mut self, id: u64) {
        let Some(active) = self.active.get(&id) else { return };
        let lanes = [(active.on_gpu, Stream::Update), (active.on_cpu, Stream::Up)];
        let used = lanes.into_iter().filter(|(used, _)| *used);
        let marks: Result<Vec<_>> = used.map(|(_, stream)| self.mark(stream).map(Arc::new)).collect();
        let events = match marks {
            Ok(events) => events,
            Err(error) => {
                self.fail(id, &error);
                Vec::new()
            }
        };
        let Some(active) = self.active.get(&id) else { return };
        let now = self.shared.now();
        let mut state = self.shared.lock();
        for Member { slot, .. } in &active.job.slots {
            if let Some(progress) = state.progress.get_mut(slot) {
                progress.unissued -= 1;
                progress.events.clone_from(&events);
            }
        }
        state.stats.issue_seconds = now - state.issue_mark;
        drop(state);
        self.shared.moved.notify_all();
    }

    /// Counts elements of jobs as landed; what is complete is told, with its failures.
    pub(super) fn land(&mut self, landed: Vec<Landed>) {
        let now = self.shared.now();
        let record = self.shared.record_timeline.load(Ordering::Relaxed);
        for chunk in landed {
            self.ranges.end(&chunk);
            let Landed { job: id, elements, began, stages, issued, lane } = chunk;
            if !issued {
                self.issued(id, elements);
            }
            let Some(active) = self.active.get_mut(&id) else { continue };
            if record {
                let label = active.job.slots.first().map_or_else(String::new, |member| member.name.to_string());
                self.shared.lock().timeline.extend(stretches(lane, &label, [began, now], stages));
            }
            active.unlanded -= elements;
            if active.unlanded > 0 {
                continue;
            }
            self.complete(id);
        }
    }

    /// Ends a job of which everything has landed, or has its gradients unscaled where they stay and ends it then.
    fn complete(&mut self, id: u64) {
        let Some(active) = self.active.get_mut(&id) else { return };
        if active.job.unscale.is_empty() {
            self.finish(id);
            return;
        }
        let unscale = std::mem::take(&mut active.job.unscale);
        active.on_gpu = true;
        let unscaled =
            unscale.iter().try_for_each(|(_, grad, scale)| self.device.unscale(grad, *scale, Stream::Update));
        if let Err(error) = unscaled {
            self.fail(id, &error);
        }
        self.announce(id);
        match self.mark(Stream::Update) {
            Ok(done) => self.unscaling.push_back((id, done)),
            Err(error) => {
                self.fail(id, &error);
                self.drain(&[Stream::Update]);
                self.finish(id);
            }
        }
    }

    pub(super) fn mark(&self, stream: Stream) -> Result<D::Event> {
        let event = self.device.event()?;
        self.device.record(&event, stream)?;
        Ok(event)
    }

    /// Waits for streams after a mark could not be set, so that memory may be given back.
    pub(super) fn drain(&mut self, streams: &[Stream]) {
        if let Err(error) = self.device.drain(streams) {
            self.lost.get_or_insert(error);
        }
    }

    /// Notes what the workers could not update; the rest of the parameter is not taken any more.
    pub(super) fn note_broken(&mut self, id: u64, broken: &[Broken]) {
        let Some(active) = self.active.get_mut(&id).filter(|_| !broken.is_empty()) else { return };
        active.has_failed = true;
        self.shared.tell_failures(broken.iter().map(|broken| {
            let Broken { slot, name, first, len, cause } = broken.clone();
            (slot, Failure { parameter: name.to_string(), first, len, cause })
        }));
        self.drop_rest(id);
    }

    /// Notes a failure of a whole job; what is left of it is not taken any more.
    pub(super) fn fail(&mut self, id: u64, error: &Error) {
        let Some(active) = self.active.get_mut(&id) else { return };
        let cause = error.to_string();
        active.has_failed = true;
        self.shared.tell_failures(active.job.slots.iter().map(|member| member.failure(&cause)));
        self.drop_rest(id);
    }

    fn drop_rest(&mut self, id: u64) {
        let Some(active) = self.active.get_mut(&id) else { return };
        let key = (if self.fifo { 0 } else { active.job.next_use }, id);
        // Not whether any elements are left: a job of none is in the queue, too.
        if !self.queue.remove(key) {
            return;
        }
        let rest = std::mem::take(&mut active.untaken);
        active.unlanded -= rest;
        let landed = active.unlanded == 0;
        self.issued(id, rest);
        if landed {
            self.complete(id);
        }
    }

    /// Ends a job that has not been started, as failed.
    pub(super) fn refuse(&mut self, job: Job<D>) {
        let cause = self.broken.clone().unwrap_or_else(|| "its state is half updated since an earlier failure".into());
        let mut state = self.shared.lock();
        for member in &job.slots {
            state.failures.push(member.failure(&cause));
            if let Some(progress) = state.progress.get_mut(&member.slot) {
                progress.unissued -= 1;
            }
        }
        drop(state);
        self.end_turns(job.id, &job.slots);
        self.release(job);
    }

    /// Lets the next update of these slots have its turn.
    fn end_turns(&mut self, id: u64, slots: &[Member]) {
        for Member { slot, .. } in slots {
            if let Entry::Occupied(mut turns) = self.turns.entry(*slot) {
                turns.get_mut().retain(|&turn| turn != id);
                if turns.get().is_empty() {
                    turns.remove();
                }
            }
        }
        self.unblocked = true;
    }

    /// After the device has failed: nothing in flight will land, and nothing more is started.
    pub(super) fn break_down(&mut self, error: &Error) {
        let cause = error.to_string();
        self.broken = Some(cause.clone());
        self.shared.lock().broken = Some(cause);
        let mut lost = self.host.abandon();
        if let Some(gpu) = &mut self.gpu {
            lost.extend(gpu.abandon());
        }
        for Resident { job, began, table, staged, .. } in self.resident.drain(..) {
            std::mem::forget((table, staged));
            let elements = self.active.get(&job).map_or(0, |active| active.unlanded);
            lost.push(Landed { job, elements, began, stages: None, issued: true, lane: "resident" });
        }
        let unscaling: Vec<u64> = self.unscaling.drain(..).map(|(id, _)| id).collect();
        let mut all: Vec<u64> = self.active.keys().copied().collect();
        all.sort_unstable();
        for id in all {
            self.fail(id, error);
        }
        for id in unscaling {
            self.finish(id);
        }
        self.land(lost);
    }

    /// After a panic, when nobody knows how far anything is: everything has failed, and nobody waits any longer.
    pub(super) fn give_up(mut self, cause: &str) {
        const OWN: [Stream; 5] = [Stream::StateIn, Stream::Update, Stream::StateOut, Stream::Down, Stream::Up];
        let cause = format!("outboard's dispatcher has failed, which is a bug in outboard: {cause}");
        // Whoever is told that it is over may touch the memory: the workers first, which hold this until they are done.
        while Arc::strong_count(&self.workers.tell) > 1 {
            std::thread::sleep(Duration::from_micros(100));
        }
        let drained = self.device.drain(&OWN);
        let mut state = self.shared.lock();
        let active = std::mem::take(&mut self.active).into_values().map(|active| active.job);
        let waiting = self.pending.drain().flat_map(|(_, jobs)| jobs).chain(self.parked.drain(..));
        let jobs: Vec<Job<D>> = active.chain(waiting).chain(std::mem::take(&mut state.inbox)).collect();
        let known: HashMap<usize, &Member> =
            jobs.iter().flat_map(|job| &job.slots).map(|member| (member.slot, member)).collect();
        let slots: Vec<usize> = state.progress.drain().map(|(slot, _)| slot).collect();
        for slot in slots {
            let nameless = || Failure { parameter: format!("#{slot}"), first: 0, len: 0, cause: cause.clone() };
            let failure = known.get(&slot).map_or_else(nameless, |member| member.failure(&cause).1);
            state.poisoned.insert(slot);
            state.failures.push((slot, failure));
        }
        state.broken = Some(cause);
        state.waiting_bytes = 0;
        state.stats.queue.0 = 0;
        drop(state);
        let shared = Arc::clone(&self.shared);
        if drained.is_err() {
            // The device may still write there. But for the channel: whose other end waits for it to close.
            self.over = std::sync::mpsc::channel().0;
            std::mem::forget((jobs, self));
        } else {
            drop(jobs);
        }
        shared.moved.notify_all();
    }

    pub(super) fn finish(&mut self, id: u64) {
        let Some(Active { job, .. }) = self.active.remove(&id) else { return };
        self.end_turns(id, &job.slots);
        self.release(job);
    }

    /// Hands a job that is over to the thread that lets its tensors go.
    fn release(&self, job: Job<D>) {
        let Job { slots, grad_bytes, whole, keep, work, .. } = job;
        // It outlives the dispatcher.
        let _ = self.over.send(Over { slots, grad_bytes, whole, tensors: (keep, work) });
    }
}

/// What is left of a job that is over.
pub(in crate::engine::lanes) struct Over {
    slots: Vec<Member>,
    grad_bytes: usize,
    whole: bool,
    tensors: (Vec<Box<dyn Any + Send>>, Work),
}

/// Lets tensors go, on a thread of its own until the dispatcher has ended: it may take a lock of theirs (the interpreter's,
/// for milliseconds), and the lanes must not stand still meanwhile.
pub(in crate::engine::lanes) fn release_all<D: Device>(shared: &Shared<D>, over: &Receiver<Over>) {
    for Over { slots, grad_bytes, whole, tensors } in over {
        // Before anybody is told: a caller may be waiting for their memory.
        drop(tensors);
        settle(&mut shared.lock(), &slots, grad_bytes, whole);
        shared.moved.notify_all();
    }
}

/// Counts a job as over, or a part of one that has been split.
fn settle<D: Device>(state: &mut State<D>, slots: &[Member], grad_bytes: usize, whole: bool) {
    for Member { slot, .. } in slots {
        if let Some(progress) = state.progress.get_mut(slot) {
            progress.unlanded -= 1;
            if progress.unlanded == 0 {
                state.progress.remove(slot);
            }
        }
    }
    // They are 0 already where the dispatcher has given up.
    state.waiting_bytes = state.waiting_bytes.saturating_sub(grad_bytes);
    state.stats.queue.0 = state.stats.queue.0.saturating_sub(usize::from(whole));
}
