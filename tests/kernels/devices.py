"""What tests ask of the machine that they run on."""

import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
