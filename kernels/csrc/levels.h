// Levels: forms of the same kernels for several instruction sets, of which a processor has some.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace levels {

// Returns the levels that are compiled, in the order of `all`: of a weak name that nothing defines the address is null.
template <typename Level>
std::vector<Level> compiled(std::initializer_list<const Level*> all) {
    std::vector<Level> levels;
    for (const Level* level : all)
        if (level) levels.push_back(*level);
    return levels;
}

// Returns the level of this name. `asked`: what a level's own check of the processor takes besides. Throws
// std::invalid_argument for a name that none has, and for a level that this processor lacks.
template <typename Level, typename... Asked>
const Level& named(const std::vector<Level>& all, const std::string& name, const Asked&... asked) {
    for (const Level& level : all)
        if (name == level.name) {
            if (!level.is_supported(asked...)) throw std::invalid_argument("this processor has no " + name);
            return level;
        }
    throw std::invalid_argument("no level " + name);
}

// Returns the names of those that this processor has, in the order of `all`.
template <typename Level, typename... Asked>
std::vector<std::string> supported(const std::vector<Level>& all, const Asked&... asked) {
    std::vector<std::string> names;
    for (const Level& level : all)
        if (level.is_supported(asked...)) names.emplace_back(level.name);
    return names;
}

}  // namespace levels
