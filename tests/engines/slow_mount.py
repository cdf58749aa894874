"""A folder on a disk that can be made slow: each read takes as many seconds longer as a file says.

    slow_mount.py FOLDER MOUNTPOINT DELAY

A file system in user space (FUSE) in front of FOLDER; DELAY is read again for each read. Ends when it is unmounted.
"""

import os
import sys
import time

import mfusepy


class SlowReads(mfusepy.Operations):
    use_ns = True

    def __init__(self, folder, delay):
        self.folder, self.delay = folder, delay

    def at(self, path):
        return os.path.join(self.folder, path.lstrip("/"))

    def getattr(self, path, fh=None):
        try:
            found = os.lstat(self.at(path))
        except OSError as problem:
            raise mfusepy.FuseOSError(problem.errno) from problem
        names = ("st_atime_ns", "st_ctime_ns", "st_mtime_ns", "st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_blocks")
        return {name.removesuffix("_ns"): getattr(found, name) for name in names}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.at(path))]

    def statfs(self, path):
        found = os.statvfs(self.at(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def create(self, path, mode, fi=None):
        return os.open(self.at(path), os.O_CREAT | os.O_RDWR, mode)

    def open(self, path, flags):
        return os.open(self.at(path), os.O_RDWR)

    def release(self, path, fh):
        os.close(fh)

    def read(self, path, size, offset, fh):
        try:
            with open(self.delay) as file:
                time.sleep(float(file.read() or 0))
        except FileNotFoundError:
            pass
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self.at(path), length)

    def fallocate(self, path, mode, offset, length, fh):
        os.posix_fallocate(fh, offset, length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def unlink(self, path):
        os.unlink(self.at(path))

    def mkdir(self, path, mode):
        os.mkdir(self.at(path), mode)

    def rename(self, old, new):
        os.rename(self.at(old), self.at(new))


if __name__ == "__main__":
    folder, mountpoint, delay = map(os.path.abspath, sys.argv[1:4])
    mfusepy.FUSE(SlowReads(folder, delay), mountpoint, foreground=True)
