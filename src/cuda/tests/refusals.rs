//! What is refused, and what is nothing to do, before a device is looked at: on any machine.

use super::*;
use crate::kernel::{AdamWConfig, NORM_BLOCK};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};

const INVALID_VALUE: c_int = 1;

fn at(address: usize) -> *mut c_void {
    without_provenance_mut(address)
}

/// Eight fp32 elements at addresses that nobody looks at.
fn run() -> sys::Update {
    sys::Update {
        constants: AdamWConfig::default().constants(1.0, 1.0),
        weight: at(64),
        kept: at(64),
        grad: at(64),
        exp_avg: at(64),
        exp_avg_sq: at(64),
        max_exp_avg_sq: null_mut(),
        n: 8,
        first: 0,
        noise_key: 0,
        grad_scale: 1.0,
    }
}

fn single(kinds: [c_int; 3], update: *const sys::Update) -> c_int {
    let [weight, grad, moments] = kinds;
    // SAFETY: the update is null or lives, and each below has something that is refused.
    unsafe { sys::outboard_cuda_adamw(sys::CURRENT_DEVICE, weight, grad, moments, update, 0, null_mut()) }
}

/// The code and what was refused.
fn many(kinds: [c_int; 3], table: (*mut c_void, u64), updates: &[sys::Update]) -> (c_int, u64) {
    let [weight, grad, moments] = kinds;
    let mut refused = 77;
    // SAFETY: as in `single`; the table is room for its items, or refused.
    let code = unsafe {
        sys::outboard_cuda_adamw_many(
            sys::CURRENT_DEVICE,
            weight,
            grad,
            moments,
            table.0,
            table.1,
            updates.as_ptr(),
            updates.len() as u64,
            &raw mut refused,
            null_mut(),
        )
    };
    (code, refused)
}

/// Room for a table, aligned.
#[repr(align(16))]
struct Room([u8; 4 * crate::device::TABLE_ENTRY_BYTES]);

impl Room {
    fn new() -> Self {
        Self([0; 4 * crate::device::TABLE_ENTRY_BYTES])
    }

    fn table(&mut self) -> (*mut c_void, u64) {
        (self.0.as_mut_ptr().cast(), self.0.len() as u64)
    }
}

#[test]
fn no_elements_need_no_device() {
    // SAFETY: with no elements the addresses are not looked at.
    unsafe { adamw(&nothing("empty"), 0) }.unwrap();
    assert_eq!(many([0; 3], (null_mut(), 0), &[]), (0, 0));
    let empty = sys::Update { n: 0, weight: null_mut(), ..run() };
    assert_eq!(many([1, 2, 1], (null_mut(), 0), &[empty, empty]), (0, 2));
    let copy = sys::Copy { to: null_mut(), from: null(), bytes: 0 };
    let grad = sys::Grad { address: null_mut(), n: 0, kind: 2 };
    // SAFETY: with nothing to do no address is looked at.
    unsafe {
        assert_eq!(sys::outboard_cuda_copy_many(0, null_mut(), 0, &raw const copy, 1, null_mut()), 0);
        assert_eq!(sys::outboard_cuda_copy_many(0, null_mut(), 0, null(), 0, null_mut()), 0);
        assert_eq!(sys::outboard_cuda_copy_async(0, sys::TO_HOST, null_mut(), null(), 0, null_mut()), 0);
        let squares = sys::outboard_cuda_squares(0, null_mut(), 0, null_mut(), 0, &raw const grad, 1, 1.0, null_mut());
        assert_eq!(squares, 0);
        assert_eq!(sys::outboard_cuda_unscale(0, &raw const grad, 2.0, null_mut()), 0);
    }
}

#[test]
fn wrong_updates_are_refused() {
    let cases = [
        ("weight kind", [4, 0, 0], run()),
        ("grad kind", [0, 3, 0], run()),
        ("moment kind", [0, 0, -1], run()),
        ("kind of an empty run", [4, 0, 0], sys::Update { n: 0, ..run() }),
        ("negative length", [0; 3], sys::Update { n: u64::MAX, ..run() }),
        ("end beyond 2^64", [0; 3], sys::Update { first: u64::MAX - 7, ..run() }),
        ("no weight", [0; 3], sys::Update { weight: null_mut(), ..run() }),
        ("no gradient", [0; 3], sys::Update { grad: null(), ..run() }),
        ("no residual", [1, 0, 0], sys::Update { kept: null_mut(), ..run() }),
        ("misaligned weight", [1, 0, 0], sys::Update { weight: at(65), ..run() }),
        ("misaligned moment", [0; 3], sys::Update { exp_avg: at(66), ..run() }),
        ("misaligned maximum", [0; 3], sys::Update { max_exp_avg_sq: at(66), ..run() }),
    ];
    let mut room = Room::new();
    for (what, kinds, update) in cases {
        assert_eq!(single(kinds, &raw const update), INVALID_VALUE, "{what}");
        let (code, refused) = many(kinds, room.table(), &[sys::Update { n: 0, ..run() }, run(), update]);
        assert_eq!(code, INVALID_VALUE, "{what}");
        let all_alike = what.contains("kind");
        assert_eq!(refused, if all_alike { 3 } else { 2 }, "{what}");
    }
    assert_eq!(single([0; 3], null()), INVALID_VALUE, "no update");
}

#[test]
fn wrong_tables_are_refused() {
    let mut room = Room::new();
    let (table, bytes) = room.table();
    for (what, table) in [
        ("missing", (null_mut(), bytes)),
        ("misaligned", (table.wrapping_byte_add(8), bytes)),
        ("too small", (table, 2 * crate::device::TABLE_ENTRY_BYTES as u64 - 1)),
    ] {
        assert_eq!(many([0; 3], table, &[run(), run()]), (INVALID_VALUE, 2), "{what}");
    }
}

#[test]
fn wrong_copies_and_gradients_are_refused() {
    let mut room = Room::new();
    let (table, bytes) = room.table();
    for (to, from) in [(0, 64), (64, 0), (65, 64), (64, 67)] {
        let copy = sys::Copy { to: at(to), from: at(from), bytes: 6 };
        // SAFETY: refused because of an address.
        let code = unsafe { sys::outboard_cuda_copy_many(0, table, bytes, &raw const copy, 1, null_mut()) };
        assert_eq!(code, INVALID_VALUE, "{copy:?}");
    }
    // SAFETY: refused because of the direction.
    let code = unsafe { sys::outboard_cuda_copy_async(0, 2, at(64), at(64), 8, null_mut()) };
    assert_eq!(code, INVALID_VALUE);

    let squares = |grad: sys::Grad, partials: usize, count: u64| {
        let partials = without_provenance_mut(partials);
        // SAFETY: each below has something that is refused.
        unsafe { sys::outboard_cuda_squares(0, table, bytes, partials, count, &raw const grad, 1, 1.0, null_mut()) }
    };
    let fine = sys::Grad { address: at(64), n: NORM_BLOCK as u64 + 1, kind: 0 };
    for grad in [
        sys::Grad { kind: 3, ..fine },
        sys::Grad { kind: -1, n: 0, ..fine },
        sys::Grad { address: null_mut(), ..fine },
        sys::Grad { address: at(66), ..fine },
        sys::Grad { address: at(65), kind: 1, ..fine },
    ] {
        assert_eq!(squares(grad, 64, 2), INVALID_VALUE, "{grad:?}");
        // SAFETY: as above.
        let code = unsafe { sys::outboard_cuda_unscale(0, &raw const grad, 2.0, null_mut()) };
        assert_eq!(code, INVALID_VALUE, "{grad:?}");
    }
    for (partials, count) in [(0, 2), (68, 2), (64, 1)] {
        assert_eq!(squares(fine, partials, count), INVALID_VALUE, "{count} partial sums at {partials}");
    }
}

#[test]
fn a_refused_update_names_the_parameter_and_cudas_error() {
    // SAFETY: refused because its planes are missing.
    let error = unsafe { adamw(&DeviceUpdate { len: 8, first: 16, ..nothing("layers.3.weight") }, 0) }.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("layers.3.weight, elements 16..24") && said.contains("cudaErrorInvalidValue"), "{said}");
}
