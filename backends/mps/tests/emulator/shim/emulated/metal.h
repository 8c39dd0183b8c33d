// Metal's standard library: every header of Metal's includes this one.
#pragma once
#include "language.h"
#include "vectors.h"
#include "traits.h"
#include "machine.h"
#include "mathematics.h"
#include "integers.h"
#include "atomics.h"
#include "simdgroups.h"
#include "matrices.h"
