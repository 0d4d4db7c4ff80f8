//! The engine over a simulated device: the host's bits, exactly once, in order, and to the end whatever fails.

mod bits;
mod drops;
mod events;
mod failures;
mod offloads;
mod order;
mod repeats;
mod rig;
mod tools;
mod totals;
mod watched;
