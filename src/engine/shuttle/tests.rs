//! How a shuttle moves state: bytes and order over a simulated device, refusals, failures, and any sequence of calls
//! beside a plain model.

mod copies;
mod failures;
mod model;
mod places;
mod rig;
mod trips;
