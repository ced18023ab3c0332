"""Checkpoint files: sharded folders and full files, with digests, replaced atomically.

In reading order:

===================================== =================================================================================
held_tensor, source                   The vocabulary: this rank's rectangles of a tensor; a state to load from.
dcp_format, dcp_metadata              PyTorch's distributed checkpoints: items, flat names, table of contents.
checksums, manifest                   XXH3 digests, and the manifest that covers every byte of a folder.
write_plan, staging, writer           Sharded save: assignment to ranks, host copies, one file per rank.
ranks, async_save                     Errors of one rank become errors of all; writing in the background.
atomic_commit, disk, write_errors     Atomic replacement: after a crash, the old checkpoint or the new one.
detect_sharded, verified_reads        Sharded load: open a folder, read and verify the bytes that are needed,
reshard, reader, lazy_tensor          copy stored rectangles to local ones, tensors that are read when used.
safetensors_file                      A safetensors file that is written one tensor at a time.
full_file, full_file_digests          Full checkpoint: one file of ``torch.save`` with digests inside.
file_runs                             Runs of elements of weights in safetensors and in mapped files.
torch_load                            ``torch.load`` without running code of a file.
path_kind, sagemaker_folder           Format detection, and folders that may be replaced; tagged checkpoints.
folder_digests                        Manifests for folders in other programs' formats.
verify, damage, fallback              Full verification, damage report, the newest undamaged checkpoint.
===================================== =================================================================================
"""
