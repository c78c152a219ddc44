// Tensors, weights and whole models on disk (safetensors; the peers' file names).
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>

#include "models/language_model.h"

namespace fenwick::models {

using TensorMap = std::map<std::string, torch::Tensor>;

struct SafetensorsFile {
  TensorMap tensors;  // on the CPU, owning their memory
  std::map<std::string, std::string> metadata;
};

// Throws Error that names the file and what is wrong with it.
SafetensorsFile LoadSafetensors(const std::filesystem::path& path);
// Writes to a temporary name and renames.
void SaveSafetensors(const std::filesystem::path& path, const TensorMap& tensors,
                     const std::map<std::string, std::string>& metadata = {});

// The parameters of a module by name. Loading converts to the types and devices that the
// parameters have; it throws Error that names the first tensor which is missing, unknown or of
// another shape, and then changes nothing.
void SaveWeights(const torch::nn::Module& module, const std::filesystem::path& path);
void LoadWeights(torch::nn::Module& module, const std::filesystem::path& path);
void LoadWeights(torch::nn::Module& module, const TensorMap& weights);

// A folder with config.json and model.safetensors.
void SaveModel(const LanguageModel& model, const std::filesystem::path& folder);
LanguageModel LoadModel(const std::filesystem::path& folder);

}  // namespace fenwick::models
