#include "emulated/tensors.h"
