//! The emulator as a plain shared library, as a stand-in of the CUDA driver loads it.

#[allow(dead_code, reason = "shared with the sanitized tests")]
#[path = "emulator/harness.rs"]
mod harness;

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use dataplane_kernels::{Batch, ChecksumArrays, ChecksumPlan, Device, FUNCTIONS, Item, Scratch, checksum};
use libloading::{Library, Symbol};

type Sizes = unsafe extern "C" fn(*const c_char, *mut usize, c_int) -> c_int;
type Translate = extern "C" fn(c_ulonglong) -> *mut c_void;
type SetTranslate = unsafe extern "C" fn(Option<Translate>);
type Emulate =
    unsafe extern "C" fn(*const c_char, *const c_uint, *const c_uint, c_uint, *mut *mut c_void) -> c_int;

fn library() -> Option<Library> {
    let options = ["-O2", "-shared", "-fPIC"];
    let path = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &options)?;
    // SAFETY: the library was just built from this crate's text; its initialisers only fill its own tables.
    Some(unsafe { Library::new(path) }.expect("the library loads"))
}

#[test]
fn every_function_is_there_and_its_parameters_have_the_size_of_ours() {
    let Some(library) = library() else { return };
    // SAFETY: the type is that of `kvasir_parameter_sizes` in emulator_api.h.
    let sizes: Symbol<'_, Sizes> = unsafe { library.get(b"kvasir_parameter_sizes") }.expect("a symbol");
    let ask = |name: &str| {
        let name = CString::new(name).expect("no zero");
        let mut size = 0;
        // SAFETY: the name ends with a zero, and there is place for one number.
        (unsafe { sizes(name.as_ptr(), &raw mut size, 1) }, size)
    };
    for function in FUNCTIONS {
        let wanted = match function {
            name if name.contains("checksum") => size_of::<dataplane_kernels::ChecksumParameters>(),
            _ => size_of::<dataplane_kernels::CopyParameters>(),
        };
        assert_eq!(ask(function), (1, wanted), "{function}");
    }
    assert_eq!(ask("kvasir_gather_3").0, -1);
}

const AWAY: u64 = 0x1_0000_0000_0000;

extern "C" fn translate(address: c_ulonglong) -> *mut c_void {
    (address - AWAY) as *mut c_void
}

#[test]
fn a_launch_through_the_library_reads_and_writes_translated_memory() {
    let Some(library) = library() else { return };
    // SAFETY: the type is that of `kvasir_emulate` in emulator_api.h.
    let emulate: Symbol<'_, Emulate> = unsafe { library.get(b"kvasir_emulate") }.expect("a symbol");
    // SAFETY: the type is that of `kvasir_set_translate` in emulator_api.h.
    let set: Symbol<'_, SetTranslate> = unsafe { library.get(b"kvasir_set_translate") }.expect("a symbol");
    #[repr(align(16))]
    struct Slot([u8; 50_000]);
    let mut slot = Box::new(Slot([0; 50_000]));
    slot.0.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7) as u8);
    for away in [0, AWAY] {
        // SAFETY: the function stays for the length of the program.
        unsafe { set(if away == 0 { None } else { Some(translate) }) };
        let place = |pointer: *const c_void| pointer as u64 + away;
        #[repr(align(16))]
        struct Items([Item; 1]);
        let items = Items([Item { slot: place((&raw const *slot).cast()), block: 0 }]);
        let (mut status, mut found, mut scratch) = (0_u32, 0_u64, Scratch::default());
        let batch = Batch {
            items: place((&raw const items).cast()),
            count: 1,
            planes: 0,
            status: place((&raw mut status).cast()),
            sums: Some(ChecksumArrays {
                checksums: place((&raw mut found).cast()),
                scratch: place((&raw mut scratch).cast()),
                expected: 0,
            }),
        };
        let launch = ChecksumPlan::new(50_000, 16)
            .and_then(|plan| plan.launch(&batch, Device { multiprocessors: 1 }))
            .expect("a launch");
        let name = CString::new(launch.function).expect("no zero");
        let mut parameters = [launch.parameters.as_bytes().as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the parameters are those of the function, and the memory that they name is alive and of that size.
        let result = unsafe {
            emulate(name.as_ptr(), launch.grid.as_ptr(), launch.block.as_ptr(), 0, parameters.as_mut_ptr())
        };
        assert_eq!((result, items.0.len()), (0, 1));
        // SAFETY: the pointer is to a number of this function that the launch has written.
        let found = unsafe { (&raw const found).read_volatile() };
        assert_eq!(found, checksum(&slot.0));
        // SAFETY: as above.
        assert_eq!(unsafe { (&raw const status).read_volatile() }, 0);
    }
}
