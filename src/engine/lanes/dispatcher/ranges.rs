//! Ranges for profilers, one for each chunk: begun when its lane takes it, ended when it lands, however it ends.

use crate::device::Device;
use crate::engine::lanes::Shared;
use crate::engine::lanes::job::Job;
use crate::engine::lanes::parts::Chunk;
use crate::engine::lanes::report::Landed;
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// The ranges of chunks in flight, by their job and the moment they began. What is left ends with the dispatcher.
#[derive(Default)]
pub(super) struct Ranges(HashMap<(u64, u64), Vec<Box<dyn Any + Send>>>);

impl Ranges {
    /// Begins the range of elements `first..last` of a job, if ranges have been asked for.
    pub(super) fn begin<D: Device>(
        &mut self,
        (device, shared): (&D, &Shared<D>),
        job: Option<&Job<D>>,
        lane: &str,
        began: f64,
        (first, last): (usize, usize),
    ) {
        if !shared.emit_ranges.load(Ordering::Relaxed) {
            return;
        }
        let Some(job) = job else { return };
        let name = job.slots.first().map_or("", |member| &*member.name);
        let more = match job.slots.len() {
            0 | 1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        let range = device.begin_range(&format!("{lane} {name}{more} [{first}:{last}]"));
        self.0.entry((job.id, began.to_bits())).or_default().push(range);
    }

    /// Ends the range of a chunk that has landed.
    pub(super) fn end(&mut self, &Landed { job, began, .. }: &Landed) {
        let key = (job, began.to_bits());
        if let Some(ranges) = self.0.get_mut(&key) {
            ranges.pop();
            if ranges.is_empty() {
                self.0.remove(&key);
            }
        }
    }
}

/// The elements of chunks that are taken together: of a parameter, or all of a bundle's.
pub(super) fn span(chunks: &[Chunk]) -> (usize, usize) {
    let first = chunks.first().map_or(0, |chunk| chunk.first);
    (first, first + chunks.iter().map(|chunk| chunk.len).sum::<usize>())
}
