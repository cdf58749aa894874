//! Prints what `kvasir doctor` says about eBPF.

fn main() {
    for finding in dataplane_ebpf::probe() {
        println!("{finding}");
    }
}
