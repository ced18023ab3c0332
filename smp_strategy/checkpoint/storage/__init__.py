"""Checkpoint files: sharded folders and full files, with digests, replaced atomically.

In reading order:

===================================== =================================================================================
held_tensor                           The vocabulary: this rank's rectangles of a tensor; a state to load from.
dcp_format, dcp_metadata              PyTorch's distributed checkpoints: items, flat names, table of contents.
manifest                              XXH3 digests, and the manifest that covers every byte of a folder.
write_plan, writer                    Sharded save: assignment to ranks, one file per rank; errors of one reach all.
async_save                            Host copies, and writing in the background.
atomic_commit, process_marks          Atomic replacement: after a crash, the old checkpoint or the new one.
remote_path, remote_commit            Addresses (``s3://...``): paths by fsspec, and the commit object.
verified_reads, reader                Sharded load: read and verify the bytes that are needed, copy stored rectangles to
                                      local ones.
weight_file                           A safetensors file that is written one tensor at a time; reads of a part of one.
full_file, full_file_checksums        Full checkpoint: one file of ``torch.save``, verified by its checksums.
torch_load                            ``torch.load`` without running code of a file.
path_kind, sagemaker_folder           Format detection, and folders that may be replaced; tagged checkpoints.
verify                                Folders are opened; full verification, the newest undamaged checkpoint.
===================================== =================================================================================
"""
