//! A forked child gets an error from whatever reached it through the fork, never a hang; what it makes itself works. One
//! test in a binary of its own, so that no other test's thread holds a lock at the time of the fork.
#![cfg(unix)]

use outboard::device::simulated::{Schedule, SimulatedDevice};
use outboard::engine::shuttle::{Shuttle, ShuttleOptions};
use outboard::engine::{self, MomentDType, Slot, SlotSpec, StepOptions, Update, WeightKind};
use outboard::memory::Layout;
use outboard::{AdamW, AdamWConfig, Arena, Error, Isa, WorkerPool};
use std::sync::Arc;

/// Runs `checks` in a forked child and returns the number of the first that is false, if any. A child that hangs is killed
/// by its alarm.
fn in_child(checks: impl FnOnce() -> Vec<bool>) -> Option<usize> {
    // SAFETY: the child only runs `checks`, which returns, and leaves by `_exit`: it never gets to the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: sets this process's own timer.
        unsafe { libc::alarm(60) };
        let failed = checks().iter().position(|&holds| !holds);
        let code = failed.map_or(0, |check| i32::try_from(check).unwrap_or(100) + 1);
        // SAFETY: ends the process without running what belongs to the parent.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for this process's own child and writes a live i32.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "the child was ended by signal {}", libc::WTERMSIG(status));
    match libc::WEXITSTATUS(status) {
        0 => None,
        code => Some(code as usize - 1),
    }
}

fn is_forked<T>(result: &outboard::Result<T>) -> bool {
    matches!(result, Err(Error::Forked { made_in, used_in }) if made_in != used_in && *used_in == std::process::id())
}

#[test]
fn children_get_errors_and_parents_go_on() {
    let config = AdamWConfig::default();
    let pool = Arc::new(WorkerPool::new(2).unwrap());
    let mut optimizer = AdamW::new(Arc::clone(&pool), config).unwrap();
    optimizer.options.chunk_elems = 16;
    let id = optimizer.register("p", 100).unwrap();
    let (mut weights, grads) = (vec![1.0_f32; 100], vec![0.5_f32; 100]);
    optimizer.step([(id, &mut weights[..], &grads[..])]).unwrap();
    let spec = SlotSpec {
        name: "slot".into(),
        number: 0,
        layout: Layout::contiguous(1),
        weight: WeightKind::F32,
        moments: MomentDType::F32,
        amsgrad: false,
    };
    let mut arena = Arena::default();
    let mut slot = Slot::carve(spec.clone(), &mut arena.slab(spec.bytes().unwrap(), &pool).unwrap());
    let device = Arc::new(SimulatedDevice::new(Schedule::Random { seed: 1 }).unwrap());
    let mut shuttle = Shuttle::new(device, Arc::clone(&pool), ShuttleOptions::default()).unwrap();
    let (state, _) = shuttle.reserve(&[("exp_avg".into(), 100)], &[]).unwrap();
    shuttle.fill(&state).unwrap();
    let mut shuttle = Some(shuttle);
    let mut inherited = Some((optimizer, pool));

    for _ in 0..3 {
        let before = weights.clone();
        let failed = in_child(|| {
            let Some((optimizer, pool)) = &mut inherited else { return vec![false] };
            let one_chunk = StepOptions::default(); // would run on the calling thread
            let (mut single, single_grad) = ([1.0_f32], [1.0_f32]);
            let weight = single[..].as_mut().into();
            let update = Update { slot: &mut slot, weight, grad: single_grad[..].into(), config };
            let step = optimizer.step([(id, &mut weights[..], &grads[..])]);
            let register = optimizer.register("late", 10);
            let direct = engine::step(pool, Isa::Portable, vec![update], &one_chunk);
            let items = pool.for_each(0..1_usize, |_| ());
            let slab = arena.slab(100, pool);
            let Some(travelling) = &mut shuttle else { return vec![false] };
            let (brought, freed) = (travelling.bring(Vec::new(), None), travelling.free(&state));
            let untouched = weights == before && single == [1.0];
            // What the child makes itself works, beside what it has inherited.
            let own = (|| {
                let mut own = AdamW::new(Arc::new(WorkerPool::new(2)?), config)?;
                own.options.chunk_elems = 16;
                let id = own.register("own", 100)?;
                let mut weights = vec![1.0_f32; 100];
                own.step([(id, &mut weights[..], &grads[..])])?;
                Ok::<_, Error>(weights)
            })();
            let checks = vec![
                is_forked(&step),
                is_forked(&register),
                is_forked(&direct),
                is_forked(&items),
                is_forked(&slab),
                is_forked(&brought),
                is_forked(&freed),
                untouched,
                own.is_ok_and(|own| own[0] < 1.0 && own.iter().all(|w| *w == own[0])),
                step.is_err_and(|error| error.to_string().contains("do not survive a fork")),
            ];
            // Dropping what was inherited returns, although there is nobody to join.
            drop(inherited.take());
            drop(shuttle.take());
            checks
        });
        assert_eq!(failed, None, "the check of this number failed in the child");
        let (optimizer, pool) = inherited.as_mut().expect("only the child has dropped it");
        optimizer.step([(id, &mut weights[..], &grads[..])]).unwrap();
        assert_ne!(weights, before, "the parent goes on");
        assert_eq!(pool.for_each(0..10_usize, |_| ()).unwrap(), []);
    }
    shuttle.expect("only the child has dropped it").free(&state).unwrap();
    assert_eq!(inherited.map(|(optimizer, _)| optimizer.steps(id).unwrap()), Some(4));
}
