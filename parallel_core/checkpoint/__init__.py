"""Checkpoints on disk: no pickle, whole or not there at all, and never a whole model in a rank's memory.

Where to find things:

- `saving`, `loading`: the verbs; `background`: saves that go on while training does;
- `contents`, `plan`: what a rank has to save, and who writes what; `targets`, `matching`: where a checkpoint is loaded
  to, and whether it fits;
- `writing`, `gathering`, `reading`: tensors on their way to the disk and back;
- `objects`: the states of other objects, on their way back;
- `folder`, `manifest`, `opening`: a checkpoint's folder, and what is in it; `sense`, `untrusted`: that it may come from
  anyone;
- `describing`, `verifying`, `consolidating`, `comparing`, `distance`: what the command `parallel-core checkpoint` does;
- `safetensors_format`, `tensor_bytes`, `tree`, `optimizer_values`, `random_states`: how a thing becomes bytes or JSON.
"""
