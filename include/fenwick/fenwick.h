// All of the public API.
#pragma once

#include "fenwick/error.h"
#include "fenwick/host_state.h"
#include "fenwick/layers.h"
#include "fenwick/ops.h"
#include "fenwick/partition.h"
#include "fenwick/state.h"
#include "fenwick/tensor_view.h"
#include "fenwick/version.h"
