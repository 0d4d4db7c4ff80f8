//! One thread's update of a chunk that stays in cache: what the recipe costs apart from memory, per ISA level and dtype.
//!
//! `cargo bench --no-default-features`

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use half::{bf16, f16};
use outboard::engine::{self, MomentDType, Slot, SlotSpec, StepOptions, Update, WeightKind};
use outboard::memory::{Arena, Layout};
use outboard::{AdamWConfig, Isa, WorkerPool};

const NUMEL: usize = 16 * 1024;

fn main() {
    divan::main();
}

fn levels() -> Vec<Isa> {
    Isa::available().collect()
}

fn slot(weight: WeightKind, moments: MomentDType, pool: &WorkerPool) -> Slot {
    let layout = Layout::contiguous(NUMEL);
    let spec = SlotSpec { name: "bench".into(), number: 0, layout, weight, moments, amsgrad: false };
    let mut slab = Arena::default().slab(spec.bytes().expect("a small slot"), pool).expect("a small slab");
    Slot::carve(spec, &mut slab)
}

macro_rules! benches {
    ($($name:ident: $convert:path, $kind:expr, $moments:expr;)*) => {
        $(
            #[divan::bench(args = levels())]
            fn $name(bencher: Bencher, isa: &Isa) {
                let pool = WorkerPool::new(1).expect("one thread");
                let mut slot = slot($kind, $moments, &pool);
                let options = StepOptions::default();
                let mut weights: Vec<_> = (0..NUMEL).map(|i| $convert(i as f32 / 9e3)).collect();
                let grads = weights.clone();
                bencher.counter(ItemsCount::new(NUMEL)).bench_local(|| {
                    let weight = black_box(&mut weights[..]).into();
                    let grad = black_box(&grads[..]).into();
                    let update = Update { slot: &mut slot, weight, grad, config: AdamWConfig::default() };
                    engine::step(&pool, *isa, vec![update], &options).expect("a step")
                });
            }
        )*
    };
}

benches! {
    fp32: f32::from, WeightKind::F32, MomentDType::F32;
    bf16_split: bf16::from_f32, WeightKind::Bf16Split, MomentDType::F32;
    bf16_split_bf16_moments: bf16::from_f32, WeightKind::Bf16Split, MomentDType::Bf16;
    bf16_full: bf16::from_f32, WeightKind::Bf16Full, MomentDType::F32;
    fp16_full: f16::from_f32, WeightKind::F16Full, MomentDType::F32;
}
