//! Compiles the CUDA library in `cuda/` when the feature `cuda` is on and a compiler is found. Without one the crate is
//! built all the same, with `src/cuda/absent.rs` in the library's place.
//!
//! Environment variables:
//! - `OUTBOARD_CUDA`: `require` makes a missing compiler an error, `off` builds without the library.
//! - `OUTBOARD_NVCC`: the path of the compiler. Otherwise it is looked for in the Python that builds (the wheel
//!   `nvidia-cuda-nvcc` and its companions), then on `PATH`.
//! - `OUTBOARD_CUDA_ARCHS`: compute capabilities to compile for, as `80,90`; newer devices compile the newest one's PTX
//!   when they load it.
//! - `OUTBOARD_CUDART_DIR`: where the target's `libcudart_static.a` is; only needed to build for another processor (and
//!   then nvcc wants `NVCC_CCBIN` too).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, exit};

const SOURCES: [&str; 6] =
    ["cuda/adamw.cu", "cuda/copy.cu", "cuda/gradients.cu", "cuda/ranges.cu", "cuda/runtime.cu", "cuda/status.cu"];
const DEFAULT_ARCHS: &str = "80,90";

/// Prints where each part of the package `nvidia.cu13` is; fails if there is none.
const FIND_IN_PYTHON: &str = "import importlib.util
for place in importlib.util.find_spec('nvidia.cu13').submodule_search_locations: print(place)";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(outboard_cuda)");
    println!("cargo::rerun-if-changed=cuda");
    for name in ["OUTBOARD_CUDA", "OUTBOARD_NVCC", "OUTBOARD_CUDA_ARCHS", "OUTBOARD_CUDART_DIR"] {
        println!("cargo::rerun-if-env-changed={name}");
    }

    // What `outboard::cuda` says about this build: shown to users, so no path of this machine may be in it.
    let build = match decide() {
        Ok(compiler) => {
            let archs = archs();
            compile(&compiler, &archs);
            println!("cargo::rustc-cfg=outboard_cuda");
            describe(&compiler, &archs)
        }
        Err(reason) => reason,
    };
    println!("cargo::rustc-env=OUTBOARD_CUDA_BUILD={build}");
}

/// The compiler to use, or why there is to be no CUDA library.
fn decide() -> Result<Compiler, String> {
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Err("the crate's feature `cuda` was off".to_owned());
    }
    let wish = variable("OUTBOARD_CUDA").unwrap_or_default();
    match wish.as_str() {
        "off" => return Err("it was built with OUTBOARD_CUDA=off".to_owned()),
        "" | "auto" | "require" => {}
        other => fail(&format!("OUTBOARD_CUDA is `{other}`; it can be `auto` (the default), `require` or `off`")),
    }
    find_compiler().inspect_err(|reason| {
        let cure = "install nvidia-cuda-nvcc and its companions (pyproject.toml pins them) into the Python that \
                    builds, or set OUTBOARD_NVCC";
        if wish == "require" {
            fail(&format!("OUTBOARD_CUDA=require, but {reason}: {cure}"));
        }
        // A compiler that appears later is only noticed when one of these changes.
        for name in ["PYO3_PYTHON", "VIRTUAL_ENV", "PATH"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        let then = "then build with OUTBOARD_CUDA=require";
        println!("cargo::warning=building without the CUDA library: {reason}; {cure}, {then}");
    })
}

struct Compiler {
    nvcc: PathBuf,
    /// As nvcc says it: `13.0.88`.
    version: String,
    /// The directory of `libcudart_static.a`.
    runtime: PathBuf,
    /// Whether it has NVTX's headers, which are all of NVTX.
    has_nvtx: bool,
}

fn find_compiler() -> Result<Compiler, String> {
    let os = target("OS");
    if os != "linux" {
        return Err(format!("the CUDA library is for Linux, and this build is for {os}"));
    }
    if let Some(nvcc) = variable("OUTBOARD_NVCC") {
        let nvcc = PathBuf::from(nvcc);
        let version = version(&nvcc).unwrap_or_else(|| fail("the compiler that OUTBOARD_NVCC names does not run"));
        return Compiler::new(nvcc, version);
    }
    let on_path =
        env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|dir| dir.join("nvcc")).collect::<Vec<_>>();
    for nvcc in in_pythons().into_iter().chain(on_path) {
        if let Some(version) = version(&nvcc) {
            return Compiler::new(nvcc, version);
        }
    }
    Err("no CUDA compiler was found".to_owned())
}

/// Where the Pythons that may be building have nvcc, the likeliest first.
fn in_pythons() -> Vec<PathBuf> {
    let pythons = [
        variable("PYO3_PYTHON").map(PathBuf::from),
        variable("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python")),
        Some(manifest_dir().join(".venv/bin/python")),
        Some(PathBuf::from("python3")),
    ];
    let mut found = Vec::new();
    for python in pythons.into_iter().flatten() {
        if let Some(output) = run(Command::new(python).args(["-c", FIND_IN_PYTHON])) {
            found
                .extend(String::from_utf8_lossy(&output.stdout).lines().map(|place| Path::new(place).join("bin/nvcc")));
        }
    }
    found
}

fn version(nvcc: &Path) -> Option<String> {
    let output = run(Command::new(nvcc).arg("--version"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // "Cuda compilation tools, release 13.0, V13.0.88"
    let (_, after) = text.split_once(", V")?;
    after.split_whitespace().next().map(str::to_owned)
}

impl Compiler {
    fn new(nvcc: PathBuf, version: String) -> Result<Self, String> {
        let runtime = Self::runtime(&nvcc)?;
        let source = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("has_nvtx.cu");
        let _ = fs::write(&source, "#include <nvtx3/nvToolsExt.h>\n");
        let has_nvtx = run(Command::new(&nvcc).arg("-E").arg(&source)).is_some();
        if !has_nvtx {
            println!("cargo::warning=building without ranges for profilers: nvcc finds no nvtx3 (install nvidia-nvtx)");
        }
        Ok(Self { nvcc, version, runtime, has_nvtx })
    }

    /// Where the runtime to link is.
    fn runtime(nvcc: &Path) -> Result<PathBuf, String> {
        const LIBRARY: &str = "libcudart_static.a";
        if let Some(given) = variable("OUTBOARD_CUDART_DIR") {
            let runtime = PathBuf::from(given);
            if !runtime.join(LIBRARY).is_file() {
                fail(&format!("there is no {LIBRARY} where OUTBOARD_CUDART_DIR says"));
            }
            return Ok(runtime);
        }
        let arch = target("ARCH");
        if !env::var("HOST").unwrap_or_default().starts_with(&format!("{arch}-")) {
            return Err(format!("OUTBOARD_CUDART_DIR does not say where {LIBRARY} for {arch} is"));
        }
        // Beside the `bin` of the real nvcc: in PyPI's wheel `lib`, in the toolkit one of the others.
        let real = nvcc.canonicalize().unwrap_or_else(|_| nvcc.to_owned());
        let root = real.parent().and_then(Path::parent).unwrap_or(Path::new("")).to_owned();
        ["lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
            .into_iter()
            .map(|dir| root.join(dir))
            .find(|dir| dir.join(LIBRARY).is_file())
            .ok_or_else(|| format!("nvcc has no {LIBRARY} beside it"))
    }
}

/// The compute capabilities to compile for, ascending.
fn archs() -> Vec<u32> {
    let text = variable("OUTBOARD_CUDA_ARCHS").unwrap_or_else(|| DEFAULT_ARCHS.to_owned());
    let parsed: Result<Vec<u32>, _> = text.split(',').map(|arch| arch.trim().parse()).collect();
    let mut archs = parsed.unwrap_or_else(|_| {
        fail(&format!(
            "OUTBOARD_CUDA_ARCHS is `{text}`; it should be compute capabilities without the dot, as {DEFAULT_ARCHS}"
        ))
    });
    archs.sort_unstable();
    archs.dedup();
    archs
}

fn describe(compiler: &Compiler, archs: &[u32]) -> String {
    let codes: Vec<String> = archs.iter().map(|arch| format!("sm_{arch}")).collect();
    let nvtx = if compiler.has_nvtx { "" } else { ", no NVTX" };
    format!("nvcc {}, {} compute_{}{nvtx}", compiler.version, codes.join(" "), archs[archs.len() - 1])
}

fn compile(compiler: &Compiler, archs: &[u32]) {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut command = Command::new(&compiler.nvcc);
    // From the package's root, so that the objects hold relative names of the sources only.
    command.current_dir(manifest_dir()).args(["-lib", "-O3", "-std=c++17"]);
    // The host code must not need libstdc++.
    command.args(["-Xcompiler", "-fPIC,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"]);
    for arch in archs {
        command.args(["-gencode", &format!("arch=compute_{arch},code=sm_{arch}")]);
    }
    if compiler.has_nvtx {
        command.arg("-DOUTBOARD_CUDA_NVTX");
    }
    let newest = archs[archs.len() - 1];
    command.args(["-gencode", &format!("arch=compute_{newest},code=compute_{newest}")]);
    command.args(["--threads", &env::var("NUM_JOBS").unwrap_or_else(|_| "1".to_owned())]);
    let library = out_dir.join("liboutboard_cuda.a");
    // nvcc adds to an archive that is there, under names of its own, and the linker would take the older object.
    let _ = fs::remove_file(&library);
    command.arg("-o").arg(library).args(SOURCES);

    let output = command.output().unwrap_or_else(|error| fail(&format!("nvcc does not start: {error}")));
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        fail(&format!("nvcc failed ({}); OUTBOARD_CUDA=off builds without CUDA.\n{command:?}\n{said}", output.status));
    }
    for line in said.lines().filter(|line| !line.trim().is_empty()) {
        println!("cargo::warning=nvcc: {line}");
    }

    println!("cargo::rustc-link-search=native={}", out_dir.display());
    println!("cargo::rustc-link-search=native={}", compiler.runtime.display());
    println!("cargo::rustc-link-lib=static=outboard_cuda");
    // The static runtime opens the driver's libcuda when it is first called, so nothing else of CUDA is needed to load.
    println!("cargo::rustc-link-lib=static=cudart_static");
    for library in ["dl", "rt", "pthread"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
}

fn run(command: &mut Command) -> Option<Output> {
    command.output().ok().filter(|output| output.status.success())
}

/// An environment variable; an empty one counts as not set.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn target(what: &str) -> String {
    env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default()
}

fn manifest_dir() -> PathBuf {
    PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    exit(1);
}
