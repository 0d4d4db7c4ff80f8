//! Finds work that touches the same bytes with nothing that orders it, whether or not it went wrong this time.
//!
//! Each stream has a vector clock, and the host has one. An operation's clock is its stream's when it is given: what its
//! stream was given before, what the host had seen done, and what `order` lets it begin after. An access happens before
//! another if the other's clock has come to it. All of this is known when an operation is given, so that is when it is
//! checked: the result does not depend on when anything runs.

use super::{OperationKind, Stream};
use std::fmt;

/// Hazards that are kept; a test needs the first.
const KEPT: usize = 1000;

/// How far each stream had come, by index.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    fn at(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    fn merge(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        for (mine, &theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = theirs.max(*mine);
        }
    }

    fn tick(&mut self, stream: usize) -> u64 {
        self.0.resize(self.0.len().max(stream + 1), 0);
        self.0[stream] += 1;
        self.0[stream]
    }
}

/// Bytes from `start` to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    start: usize,
    end: usize,
    write: bool,
}

impl Access {
    pub(super) fn new(start: usize, bytes: usize, write: bool) -> Self {
        Self { start, end: start.saturating_add(bytes), write }
    }

    pub(super) fn read(start: usize, bytes: usize) -> Self {
        Self::new(start, bytes, false)
    }

    pub(super) fn write(start: usize, bytes: usize) -> Self {
        Self::new(start, bytes, true)
    }

    pub(super) fn overlaps(&self, start: usize, end: usize) -> bool {
        self.start < end && start < self.end
    }

    fn conflicts(&self, other: &Self) -> bool {
        (self.write || other.write) && self.overlaps(other.start, other.end)
    }

    /// Whether this access, coming after `earlier`, stands for it: whatever is ordered after this one is ordered after
    /// that one, too.
    fn replaces(&self, earlier: &Self) -> bool {
        self.start <= earlier.start && earlier.end <= self.end && (self.write || !earlier.write)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x}..{:#x}", if self.write { "writes" } else { "reads" }, self.start, self.end)
    }
}

/// An operation, as messages name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    pub(super) sequence: u64,
    pub(super) kind: OperationKind,
    pub(super) stream: Stream,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} on {:?}", self.sequence, self.kind, self.stream)
    }
}

/// An access that is not known to be over.
#[derive(Debug)]
struct Record {
    access: Access,
    who: Who,
    stream: usize,
    time: u64,
}

/// The clocks and what has been touched.
#[derive(Debug, Default)]
pub(super) struct Checker {
    host: Clock,
    streams: Vec<Clock>,
    records: Vec<Record>,
    found: Vec<String>,
}

impl Checker {
    pub(super) fn found(&self) -> &[String] {
        &self.found
    }

    /// An operation is given to the stream of index `stream`.
    pub(super) fn given(&mut self, stream: usize, who: Who, accesses: Vec<Access>) {
        let Self { host, streams, records, found } = self;
        streams.resize_with(streams.len().max(stream + 1), Clock::default);
        let clock = &mut streams[stream];
        clock.merge(host);
        let time = clock.tick(stream);
        let accesses = disjoint(accesses, who, found);
        records.retain(|record| {
            let ordered = clock.at(record.stream) >= record.time;
            let mut replaced = false;
            for access in overlapping(&accesses, record.access) {
                if !ordered && access.conflicts(&record.access) {
                    report(
                        found,
                        format!("{who} {access} while {} {}: nothing orders them", record.who, record.access),
                    );
                }
                replaced |= ordered && access.replaces(&record.access);
            }
            !replaced
        });
        records.extend(accesses.into_iter().map(|access| Record { access, who, stream, time }));
    }

    /// The stream's clock: what is done when all that it has been given is.
    pub(super) fn clock(&self, stream: usize) -> Clock {
        self.streams.get(stream).cloned().unwrap_or_default()
    }

    /// What the stream is given from now on comes after `mark`.
    pub(super) fn ordered(&mut self, stream: usize, mark: &Clock) {
        self.streams[stream].merge(mark);
    }

    /// The host has seen that all before `mark` is done: nothing that it does or gives from now on conflicts with that.
    pub(super) fn seen(&mut self, mark: &Clock) {
        let Self { host, records, .. } = self;
        host.merge(mark);
        records.retain(|record| host.at(record.stream) < record.time);
    }

    /// The host touches memory. Says whether something may still be using it.
    pub(super) fn host(&mut self, access: Access, what: &str) -> bool {
        let mut conflicts = false;
        for record in self.records.iter().filter(|record| access.conflicts(&record.access)) {
            conflicts = true;
            let message = format!("{what} on the host {access} while {} {}: not seen done", record.who, record.access);
            report(&mut self.found, message);
        }
        conflicts
    }

    /// Accesses that are kept to compare others with.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.records.len()
    }

    /// Whatever has been given and not run will not run.
    pub(super) fn forget(&mut self) {
        self.records.clear();
    }
}

fn report(found: &mut Vec<String>, message: String) {
    if found.len() < KEPT {
        found.push(message);
    }
}

/// The accesses sorted, without empty ones, and those merged that touch. One operation's items run side by side: where
/// they conflict, that is a hazard, too.
fn disjoint(mut accesses: Vec<Access>, who: Who, found: &mut Vec<String>) -> Vec<Access> {
    accesses.retain(|access| access.start < access.end);
    accesses.sort_by_key(|access| access.start);
    let mut merged: Vec<Access> = Vec::with_capacity(accesses.len());
    for access in accesses {
        match merged.last_mut() {
            Some(last) if access.start < last.end || (access.start == last.end && access.write == last.write) => {
                if access.conflicts(last) {
                    report(found, format!("{who} {access} and {last} at once"));
                }
                last.end = last.end.max(access.end);
                last.write |= access.write;
            }
            _ => merged.push(access),
        }
    }
    merged
}

/// Those of the sorted, disjoint accesses that overlap `access`.
fn overlapping(accesses: &[Access], access: Access) -> impl Iterator<Item = &Access> {
    let first = accesses.partition_point(|candidate| candidate.end <= access.start);
    accesses[first..].iter().take_while(move |candidate| candidate.start < access.end)
}
